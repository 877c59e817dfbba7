"""The config and the tensors of Nemotron-H's GGUFs, as llama.cpp's converter writes them.

A layer with channels of an MLP is one, or experts where it has a router; one with KV heads is
attention; the others are Mamba2, converted as all are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.gguf_mamba2 import gguf_ssm_tensor_name, undo_gguf_ssm_conversion
from modelmill.accept.reference.gguf_metadata import make_metadata_reader
from modelmill.accept.reference.gguf_source import GgufSource
from modelmill.accept.reference.tensor_source import RawContainer

NEMOTRON_H_ARCHITECTURE, NEMOTRON_H_MOE_ARCHITECTURE = "nemotron_h", "nemotron_h_moe"
BRANCH_TENSORS = {
    **{f"{part}_proj": f"attn_{part}" for part in ("q", "k", "v")},
    "o_proj": "attn_output",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "gate": "ffn_gate_inp",
    "shared_experts.up_proj": "ffn_up_shexp",
    "shared_experts.down_proj": "ffn_down_shexp",
}
TOP_LEVEL_TENSORS = {
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
HF_SELECTION_BIAS_NAME = "gate.e_score_correction_bias"


def nemotron_h_config(container: RawContainer) -> dict[str, Any]:
    """Return a config in Hugging Face keys, as far as the reference reads it."""
    fact, names = make_metadata_reader(container), set(container.names())
    layers = int(fact("block_count")) - int(fact("nextn_predict_layers", 0))

    def by_layer(key: str) -> list[int]:
        value = fact(key)
        return [int(value if isinstance(value, int) else value[layer]) for layer in range(layers)]

    kv_heads, inner = by_layer("attention.head_count_kv"), by_layer("feed_forward_length")
    width, heads = int(fact("embedding_length")), int(fact("attention.head_count"))
    ssm_heads = int(fact("ssm.time_step_rank"))
    kinds = []
    for layer in range(layers):
        kind = "attention" if kv_heads[layer] else "mamba"
        if inner[layer]:
            kind = "moe" if f"blk.{layer}.ffn_gate_inp.weight" in names else "mlp"
        kinds.append(kind)
    return {
        "model_type": "nemotron_h",
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "hidden_size": width,
        "layers_block_type": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": max([*kv_heads, 1]),
        "head_dim": int(fact("attention.key_length", width // heads)),
        "max_position_embeddings": int(fact("context_length")),
        "layer_norm_epsilon": float(fact("attention.layer_norm_rms_epsilon")),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in names),
        "use_bias": any(name.endswith(".ssm_in.bias") for name in names),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in names),
        "mamba_num_heads": ssm_heads,
        "mamba_head_dim": int(fact("ssm.inner_size")) // ssm_heads,
        "ssm_state_size": int(fact("ssm.state_size")),
        "n_groups": int(fact("ssm.group_count")),
        "n_routed_experts": int(fact("expert_count", 0)),
        "num_experts_per_tok": int(fact("expert_used_count", 0)),
        "routed_scaling_factor": float(fact("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(fact("expert_weights_norm", False)),
        "n_group": int(fact("expert_group_count", 1)),
        "topk_group": int(fact("expert_group_used_count", 1)),
        "tie_word_embeddings": "output.weight" not in names,
    }


class NemotronHGgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    def stored_tensor_name(self, name: str) -> str:
        """Return the name that the tensor has in the file."""
        if name in TOP_LEVEL_TENSORS:
            return TOP_LEVEL_TENSORS[name]
        layer, _, part = name.removeprefix("backbone.layers.").partition(".")
        if part == "norm.weight":
            return f"blk.{layer}.attn_norm.weight"
        own = part.removeprefix("mixer.")
        if own == HF_SELECTION_BIAS_NAME:
            return f"blk.{layer}.exp_probs_b.bias"
        stem, _, suffix = own.rpartition(".")
        if stem.startswith("experts."):
            return f"blk.{layer}.{BRANCH_TENSORS[stem.rpartition('.')[2]]}_exps.{suffix}"
        if stem in BRANCH_TENSORS:
            return f"blk.{layer}.{BRANCH_TENSORS[stem]}.{suffix}"
        return f"blk.{layer}.{gguf_ssm_tensor_name(own)}"

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor as it was before the conversion."""
        tensor = super().read_uncast_tensor(name)
        is_mixed = ".ssm_" in self.stored_tensor_name(name)
        return undo_gguf_ssm_conversion(name, tensor) if is_mixed else tensor


CONFIG_READERS_AND_SOURCES = dict.fromkeys(
    (NEMOTRON_H_ARCHITECTURE, NEMOTRON_H_MOE_ARCHITECTURE), (nemotron_h_config, NemotronHGgufSource)
)
