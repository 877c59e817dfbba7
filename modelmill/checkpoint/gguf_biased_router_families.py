"""GGUFs of families that choose experts with a learned bias and share no architecture with others.

dots.llm1, ERNIE 4.5 with experts, K-EXAONE, MiniMax-M2, Arcee's Trinity, Sarvam 30B and Ling 2.0.
"""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import (
    SLIDING_WINDOW_KEY,
    ArchitectureKeys,
    head_dim,
    read_window_layer_types,
)
from modelmill.checkpoint.gguf_families import (
    LLAMA_NAMES,
    MIXTRAL_EXPERT_TENSORS,
    GgufArchitecture,
    read_rms_config,
)
from modelmill.checkpoint.gguf_group_limited_experts import (
    GROUP_LIMITED_MOE_NAMES,
    read_group_limited_moe_config,
    require_sigmoid_gating,
    require_softmax_gating,
)
from modelmill.core.errors import CorruptCheckpoint

DOTS1_NAMES = {**LLAMA_NAMES, **GROUP_LIMITED_MOE_NAMES}
ERNIE_NAMES = {**DOTS1_NAMES, "blk.exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}
EXAONE_MOE_NAMES = {**DOTS1_NAMES, "blk.exp_probs_b": "mlp.e_score_correction_bias"}
MINIMAX_NAMES = {
    **LLAMA_NAMES,
    **MIXTRAL_EXPERT_TENSORS,
    "blk.ffn_gate_inp": "block_sparse_moe.gate",
    "blk.exp_probs_b": "block_sparse_moe.e_score_correction_bias",
}
AFMOE_NAMES = {
    **DOTS1_NAMES,
    "blk.attn_gate": "self_attn.gate_proj",
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.ffn_norm": "pre_mlp_layernorm",
    "blk.post_ffw_norm": "post_mlp_layernorm",
    "blk.ffn_gate_inp": "mlp.router.gate",
    "blk.exp_probs_b": "mlp.expert_bias",
}
BAILING_NAMES = {
    **{
        gguf: name for gguf, name in DOTS1_NAMES.items() if gguf not in ("blk.attn_q", "blk.attn_k")
    },
    "token_embd": "model.word_embeddings",
    "blk.attn_qkv": "attention.query_key_value",
    "blk.attn_output": "attention.dense",
    "blk.attn_q_norm": "attention.query_layernorm",
    "blk.attn_k_norm": "attention.key_layernorm",
    "blk.exp_probs_b": "mlp.gate.expert_bias",
    "blk.layer_output_norm": "final_layernorm",  # of the layer of multi-token prediction
}


def _read_dots1_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read dots.llm1; its file has no windows, which the published model does not use."""
    require_sigmoid_gating(keys)
    return {
        **read_rms_config(keys),
        **read_group_limited_moe_config(keys),
        "head_dim": head_dim(keys),
        "sliding_window": None,
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


def _read_ernie4_5_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read ERNIE 4.5: softmax, and weights that sum to 1, as llama.cpp has it fixed."""
    require_softmax_gating(keys)
    inner = keys.get_positive_int("expert_feed_forward_length")
    return {
        **read_rms_config(keys),
        "head_dim": head_dim(keys),
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "moe_num_experts": keys.get_positive_int("expert_count"),
        "moe_k": keys.get_positive_int("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": _count_shared_experts(keys, inner),
        "moe_layer_start_index": keys.get_positive_int("leading_dense_block_count", 0),
        "moe_layer_interval": keys.get_positive_int("interleave_moe_layer_step"),
    }


def _read_exaone_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read K-EXAONE; the layers of multi-token prediction are counted among the blocks."""
    require_sigmoid_gating(keys)
    experts = read_group_limited_moe_config(keys)
    count, inner = experts.pop("n_routed_experts"), experts["moe_intermediate_size"]
    del experts["n_shared_experts"]
    return {
        **read_rms_config(keys),
        **experts,
        "num_experts": count,
        "num_shared_experts": _count_shared_experts(keys, inner),
        "head_dim": head_dim(keys),
        "sliding_window": keys.get_positive_int(SLIDING_WINDOW_KEY),
        "layer_types": read_window_layer_types(keys, experts["num_hidden_layers"]),
    }


def _read_minimax_m2_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read MiniMax-M2: weights that sum to 1, as llama.cpp has it fixed."""
    require_sigmoid_gating(keys)
    config = read_rms_config(keys, partial=True)
    del config["partial_rotary_factor"]
    channels = head_dim(keys, partial=True)
    keys.view.get(f"{keys.arch}.expert_feed_forward_length")  # feed_forward_length again
    return {
        **config,
        "head_dim": channels,
        "rotary_dim": keys.get_positive_int("rope.dimension_count", channels),
        "num_local_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
    }


def _read_afmoe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Trinity; its files have no layer types, and embeddings are scaled, as in llama.cpp."""
    require_sigmoid_gating(keys)
    return {
        **read_rms_config(keys),
        "head_dim": head_dim(keys),
        "num_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
        "moe_intermediate_size": keys.get_positive_int("expert_feed_forward_length"),
        "num_shared_experts": keys.get_positive_int("expert_shared_count"),
        "num_dense_layers": keys.get_positive_int("leading_dense_block_count", 0),
        "route_scale": keys.get_positive_float("expert_weights_scale", 1.0),
        "route_norm": keys.get_flag("expert_weights_norm", True),
        "sliding_window": keys.get_positive_int(SLIDING_WINDOW_KEY),
        "layer_types": read_window_layer_types(keys, keys.get_positive_int("block_count")),
        "mup_enabled": True,
    }


def _read_sarvam_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Sarvam 30B, or Ling 2.0, which rotates a part of each head and else is alike."""
    require_sigmoid_gating(keys)
    experts = read_group_limited_moe_config(keys)
    _count_shared_experts(keys, experts["moe_intermediate_size"])
    return {
        **read_rms_config(keys, partial=True),
        **experts,
        "head_dim": head_dim(keys, partial=True),
        "attention_bias": keys.has_tensor("blk.0.attn_qkv.bias"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _count_shared_experts(keys: ArchitectureKeys, inner: int) -> int:
    """Read how many experts every token has; the file has the width of all of them besides.

    Raises:
        CorruptCheckpoint: if that is not so many times one expert's.
    """
    count = keys.get_positive_int("expert_shared_count", 0)
    width = keys.get_positive_int("expert_shared_feed_forward_length", count * inner)
    if width != count * inner:
        raise CorruptCheckpoint(
            f"{keys.raw.path}: has expert_shared_feed_forward_length {width}, but "
            f"expert_shared_count {count} and experts of {inner} channels"
        )
    return count


BIASED_ROUTER_ARCHITECTURES = {
    "afmoe": GgufArchitecture(AFMOE_NAMES, read_config=_read_afmoe_config),
    "bailingmoe2": GgufArchitecture(
        BAILING_NAMES, model_type="sarvam_moe", read_config=_read_sarvam_moe_config
    ),
    "dots1": GgufArchitecture(DOTS1_NAMES, read_config=_read_dots1_config),
    "ernie4_5-moe": GgufArchitecture(
        ERNIE_NAMES, model_type="ernie4_5_moe", read_config=_read_ernie4_5_moe_config
    ),
    "exaone-moe": GgufArchitecture(
        EXAONE_MOE_NAMES,
        model_type="exaone_moe",
        read_config=_read_exaone_moe_config,
        draft_prefix="mtp.",
    ),
    "minimax-m2": GgufArchitecture(
        MINIMAX_NAMES, model_type="minimax_m2", read_config=_read_minimax_m2_config
    ),
}
