"""Tensor names of BLOOM, ChatGLM, Falcon and GPT-NeoX, whose code began as Megatron-LM."""

from __future__ import annotations

MEGATRON_MLP_AND_NORM_NAMES = {
    "attn_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.fc_proj": ("mlp.dense_h_to_4h",),
    "mlp.gate_up_proj": ("mlp.dense_h_to_4h",),
    "mlp.down_proj": ("mlp.dense_4h_to_h",),
}


def layer_checkpoint_names(attention: str = "self_attention") -> dict[str, tuple[str, ...]]:
    """Module of a layer → its names in the checkpoint; attention: the name of that module."""
    return {
        **MEGATRON_MLP_AND_NORM_NAMES,
        "attn.qkv_proj": (f"{attention}.query_key_value",),
        "attn.o_proj": (f"{attention}.dense",),
    }
