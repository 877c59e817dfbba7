"""GGUFs of LFM2, dense and with experts: short convolutions in the layers without KV heads."""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import ArchitectureKeys, head_dim
from modelmill.checkpoint.gguf_families import LLAMA_NAMES, GgufArchitecture
from modelmill.checkpoint.gguf_group_limited_experts import require_sigmoid_gating
from modelmill.checkpoint.gguf_mamba import read_kv_heads_per_layer

LFM2_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if gguf != "output_norm"},
    "token_embd_norm": "model.embedding_norm",  # of the last states, whatever its name says
    "blk.attn_norm": "operator_norm",
    "blk.attn_output": "self_attn.out_proj",
    "blk.attn_q_norm": "self_attn.q_layernorm",
    "blk.attn_k_norm": "self_attn.k_layernorm",
    "blk.ffn_norm": "ffn_norm",
    "blk.ffn_gate": "feed_forward.w1",
    "blk.ffn_up": "feed_forward.w3",
    "blk.ffn_down": "feed_forward.w2",
    **{f"blk.shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
LFM2_MOE_NAMES = {
    **LFM2_NAMES,
    "blk.ffn_gate_inp": "feed_forward.gate",
    "blk.exp_probs_b": "feed_forward.expert_bias",
    "blk.ffn_gate_exps": "feed_forward.experts.*.w1",
    "blk.ffn_up_exps": "feed_forward.experts.*.w3",
    "blk.ffn_down_exps": "feed_forward.experts.*.w2",
}


def _read_lfm2_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read LFM2; the file has the MLP's width as it is."""
    kv_heads = read_kv_heads_per_layer(keys)
    width, heads = (
        keys.get_positive_int("embedding_length"),
        keys.get_positive_int("attention.head_count"),
    )
    channels = head_dim(keys)
    return {
        "hidden_size": width,
        "intermediate_size": keys.get_positive_int("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": keys.get_positive_int("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads),
        **({} if channels * heads == width else {"head_dim": channels}),
        "max_position_embeddings": keys.get_positive_int("context_length"),
        "norm_eps": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.get_positive_float("rope.freq_base", 10000.0),
        "layer_types": ["full_attention" if each else "conv" for each in kv_heads],
        "conv_L_cache": keys.get_positive_int("shortconv.l_cache"),
        "conv_bias": keys.has_tensor(f"blk.{kv_heads.index(0)}.shortconv.conv.bias"),
    }


def _read_lfm2_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read LFM2 with experts, whose weights sum to 1, as llama.cpp has it fixed."""
    require_sigmoid_gating(keys)
    config = _read_lfm2_config(keys)
    del config["block_auto_adjust_ff_dim"]
    return {
        **config,
        "num_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
        "moe_intermediate_size": keys.get_positive_int("expert_feed_forward_length"),
        "num_dense_layers": keys.get_positive_int("leading_dense_block_count", 0),
        "use_expert_bias": True,
        "norm_topk_prob": True,
    }


LFM2_ARCHITECTURES = {
    "lfm2": GgufArchitecture(LFM2_NAMES, read_config=_read_lfm2_config),
    "lfm2moe": GgufArchitecture(
        LFM2_MOE_NAMES, model_type="lfm2_moe", read_config=_read_lfm2_moe_config
    ),
}
