"""GGUF architectures with routers in groups: GLM-4.5, and DeepSeek-V2 and V3, which share one."""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import ArchitectureKeys, head_dim
from modelmill.checkpoint.gguf_families import LLAMA_NAMES, GgufArchitecture, read_rms_config
from modelmill.checkpoint.gguf_rope_scaling import from_metadata
from modelmill.core.errors import UnknownArchitecture

SOFTMAX_GATING, SIGMOID_GATING = 1, 2
"""Of ``expert_gating_func``."""
NEXTN_PARTS = (
    "eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm",
)  # fmt: skip
EXPERT_NAMES = {
    "blk.ffn_gate_inp": "mlp.gate",
    "blk.exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"blk.ffn_{part}_exps": f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")},
    **{
        f"blk.ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
    # of the layer of multi-token prediction, which is not used
    **{f"blk.nextn.{part}": part for part in NEXTN_PARTS},
}
GLM4_MOE_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if gguf != "blk.ffn_norm"},
    **EXPERT_NAMES,
    "blk.post_attention_norm": "post_attention_layernorm",
}
DEEPSEEK_NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "blk.attn_q_a": "self_attn.q_a_proj",
    "blk.attn_q_a_norm": "self_attn.q_a_layernorm",
    "blk.attn_q_b": "self_attn.q_b_proj",
    "blk.attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "blk.attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "blk.attn_kv_b": "self_attn.kv_b_proj",
    # in newer files the rows of keys, transposed, and those of values are apart
    "blk.attn_k_b": "self_attn.kv_b_proj",
}


def require_sigmoid_gating(keys: ArchitectureKeys) -> None:
    """Check that the scores of experts are sigmoids, or not named.

    Raises:
        UnknownArchitecture: for other scores.
    """
    gating = keys.get_count("expert_gating_func", SIGMOID_GATING)
    if gating != SIGMOID_GATING:
        raise UnknownArchitecture(
            f"{keys.raw.path}: expert_gating_func is {gating}; the scores of {keys.arch} are "
            f"sigmoids ({SIGMOID_GATING})"
        )


def _glm4_moe(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read GLM-4.5; the layers of multi-token prediction are counted among the blocks."""
    require_sigmoid_gating(keys)
    config = read_rms_config(keys, partial=True)
    return {
        **config,
        **_experts(keys),
        "head_dim": head_dim(keys, partial=True),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _experts(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the router and the sizes of experts, and the depth without layers that predict."""
    predicted = keys.get_count("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": keys.get_count("block_count") - predicted,
        "n_routed_experts": keys.get_count("expert_count"),
        "num_experts_per_tok": keys.get_count("expert_used_count"),
        "n_shared_experts": keys.get_count("expert_shared_count"),
        "moe_intermediate_size": keys.get_count("expert_feed_forward_length"),
        "first_k_dense_replace": keys.get_count("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get_positive_float("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get_flag("expert_weights_norm", keys.arch == "glm4moe"),
        "n_group": keys.get_count("expert_group_count", 1),
        "topk_group": keys.get_count("expert_group_used_count", 1),
    }


def _deepseek(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read DeepSeek-V2, whose experts have softmax, or V3, whose experts have sigmoids."""
    gating = keys.get_count("expert_gating_func", SOFTMAX_GATING)
    if gating not in (SOFTMAX_GATING, SIGMOID_GATING):
        raise UnknownArchitecture(
            f"{keys.raw.path}: expert_gating_func is {gating}, which is not known"
        )
    is_third = gating == SIGMOID_GATING
    mla = "_mla" if "attention.key_length_mla" in keys else ""
    keys.view.get(f"{keys.arch}.attention.key_length")  # with _mla: what the cache holds
    keys.view.get(f"{keys.arch}.attention.value_length")
    keys.view.get(f"{keys.arch}.attention.head_count_kv")  # one, or one for each head
    heads, turned = keys.get_count("attention.head_count"), keys.get_count("rope.dimension_count")
    rank = "attention.q_lora_rank"
    experts = _experts(keys)
    config = {
        "model_type": "deepseek_v3" if is_third else "deepseek_v2",
        "hidden_size": keys.get_count("embedding_length"),
        "intermediate_size": keys.get_count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": keys.get_count("context_length"),
        "rope_theta": keys.get_positive_float("rope.freq_base", 10000.0),
        "rope_scaling": _deepseek_scaling(keys),
        "rms_norm_eps": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "q_lora_rank": keys.get_count(rank) if rank in keys else None,
        "kv_lora_rank": keys.get_count("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys.get_count(f"attention.key_length{mla}") - turned,
        "v_head_dim": keys.get_count(f"attention.value_length{mla}"),
        "attention_bias": keys.has_tensor("blk.0.attn_kv_a_mqa.bias"),
        **experts,
    }
    if not is_third:
        grouped = experts["n_group"] > 1
        config["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    return config


def _deepseek_scaling(keys: ArchitectureKeys) -> dict[str, Any] | None:
    """Read YaRN; the multiplier is a tenth of ``mscale_all_dim``, which ``mscale`` equals."""
    multiplier = "rope.scaling.yarn_log_multiplier"
    mscale = 10 * keys.get_positive_float(multiplier) if multiplier in keys else 0.0
    others = {k: v for k, v in keys.raw.metadata.items() if k != f"{keys.arch}.{multiplier}"}
    for key in others:
        if key.startswith(f"{keys.arch}.rope.scaling."):
            keys.view.get(key)
    scaling = from_metadata(others, keys.arch)
    if scaling is None or not mscale:
        return scaling
    mscale = float(f"{mscale:.6g}")  # a tenth in float32
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


GROUPED_EXPERT_ARCHITECTURES = {
    "deepseek2": GgufArchitecture(
        DEEPSEEK_NAMES,
        read_config=_deepseek,
        joins_latent=True,
        chosen_types=("deepseek_v2", "deepseek_v3"),
    ),
    "glm4moe": GgufArchitecture(GLM4_MOE_NAMES, model_type="glm4_moe", read_config=_glm4_moe),
}
