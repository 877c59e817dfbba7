"""GGUF architectures with routers in groups: GLM-4.5, and the one of DeepSeek-V2 and V3.

Others are written as these: Solar Open as GLM-4.5, GLM-4.7-Flash, Kimi K2 and Youtu as DeepSeek.
"""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import (
    ArchitectureKeys,
    head_dim,
    yarn_mscale_rope_scaling,
)
from modelmill.checkpoint.gguf_families import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    GgufArchitecture,
    read_rms_config,
)
from modelmill.core.errors import CorruptCheckpoint, UnknownArchitecture

SOFTMAX_GATING, SIGMOID_GATING = 1, 2
"""Of ``expert_gating_func``."""
GLM_FLASH_LAYER_COUNTS, GLM_FLASH_VOCAB_SIZE = (47, 48), 154880
"""Of GLM-4.7-Flash, whose files may not name the sigmoids: llama.cpp tells it by its sizes."""
NEXTN_TENSORS = (
    "eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm",
)  # fmt: skip
GROUP_LIMITED_MOE_NAMES = {
    "blk.ffn_gate_inp": "mlp.gate",
    "blk.exp_probs_b": "mlp.gate.e_score_correction_bias",
    **EXPERT_NAMES,
    **{
        f"blk.ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
    # of the layer of multi-token prediction, which is not used
    **{f"blk.nextn.{part}": part for part in NEXTN_TENSORS},
}
GLM4_MOE_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if gguf != "blk.ffn_norm"},
    **GROUP_LIMITED_MOE_NAMES,
    "blk.post_attention_norm": "post_attention_layernorm",
}
DEEPSEEK_NAMES = {
    **LLAMA_NAMES,
    **GROUP_LIMITED_MOE_NAMES,
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
    _require_gating(keys, SIGMOID_GATING, "sigmoids")


def require_softmax_gating(keys: ArchitectureKeys) -> None:
    """Check that the scores of experts are a softmax, or not named.

    Raises:
        UnknownArchitecture: for other scores.
    """
    _require_gating(keys, SOFTMAX_GATING, "a softmax")


def _require_gating(keys: ArchitectureKeys, expected: int, scores: str) -> None:
    gating = keys.get_positive_int("expert_gating_func", expected)
    if gating != expected:
        raise UnknownArchitecture(
            f"{keys.raw.path}: expert_gating_func is {gating}; the scores of {keys.arch} are "
            f"{scores} ({expected})"
        )


def _read_glm4_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read GLM-4.5; the layers of multi-token prediction are counted among the blocks."""
    require_sigmoid_gating(keys)
    experts, inner = read_group_limited_moe_config(keys), "feed_forward_length"
    if inner not in keys and experts["first_k_dense_replace"] == 0:  # an MLP that no layer has
        inner = "expert_feed_forward_length"
    return {
        **read_rms_config(keys, partial=True, inner=inner),
        **experts,
        "head_dim": head_dim(keys, partial=True),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def read_group_limited_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the router and the sizes of experts, and the depth without layers that predict.

    Raises:
        CorruptCheckpoint: if no other layers are left.
    """
    blocks, predicted = (
        keys.get_positive_int("block_count"),
        keys.get_positive_int("nextn_predict_layers", 0),
    )
    if predicted >= blocks:
        raise CorruptCheckpoint(
            f"{keys.raw.path}: has {blocks} layers, of which {predicted} only predict "
            f"({keys.arch}.nextn_predict_layers)"
        )
    return {
        "num_hidden_layers": blocks - predicted,
        "n_routed_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
        "n_shared_experts": keys.get_positive_int("expert_shared_count"),
        "moe_intermediate_size": keys.get_positive_int("expert_feed_forward_length"),
        "first_k_dense_replace": keys.get_positive_int("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get_positive_float("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get_flag("expert_weights_norm", keys.arch == "glm4moe"),
        "n_group": keys.get_positive_int("expert_group_count", 1),
        "topk_group": keys.get_positive_int("expert_group_used_count", 1),
    }


def _read_deepseek_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read DeepSeek-V2, whose experts have softmax, V3, whose experts have sigmoids, or Youtu."""
    attention = _read_latent_attention_config(keys)
    if not keys.is_nonzero("expert_count"):
        return {"model_type": "youtu", **attention, **_read_depth_without_experts(keys)}
    experts = read_group_limited_moe_config(keys)
    if _read_expert_gating_func(keys, experts["num_hidden_layers"]) == SIGMOID_GATING:
        return {"model_type": "deepseek_v3", **attention, **experts}
    method = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    return {"model_type": "deepseek_v2", **attention, **experts, "topk_method": method}


def _read_expert_gating_func(keys: ArchitectureKeys, layers: int) -> int:
    """Read what scores the experts; without the key it is softmax, but for GLM-4.7-Flash.

    Raises:
        UnknownArchitecture: for other scores.
    """
    vocabulary = keys.raw.tensor_info("token_embd.weight").shape[0]
    is_flash = layers in GLM_FLASH_LAYER_COUNTS and vocabulary == GLM_FLASH_VOCAB_SIZE
    gating = keys.get_positive_int(
        "expert_gating_func", SIGMOID_GATING if is_flash else SOFTMAX_GATING
    )
    if gating not in (SOFTMAX_GATING, SIGMOID_GATING):
        raise UnknownArchitecture(
            f"{keys.raw.path}: expert_gating_func is {gating}, which is not known"
        )
    return gating


def _read_depth_without_experts(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the depth; keys of experts are there, too, as llama.cpp requires them."""
    layers, dense = keys.get_positive_int("block_count"), "leading_dense_block_count"
    if keys.get_positive_int(dense, layers) < layers:
        raise CorruptCheckpoint(
            f"{keys.raw.path}: the key {keys.arch}.{dense} leaves layers with experts, but "
            f"{keys.arch}.expert_count is missing"
        )
    for key in keys.raw.metadata:
        if key.startswith(f"{keys.arch}.expert_"):
            keys.view.get(key)
    return {"num_hidden_layers": layers}


def _read_latent_attention_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read what all have but the experts and the depth."""
    mla = "_mla" if "attention.key_length_mla" in keys else ""
    keys.view.get(f"{keys.arch}.attention.key_length")  # with _mla: what the cache holds
    keys.view.get(f"{keys.arch}.attention.value_length")
    keys.view.get(f"{keys.arch}.attention.head_count_kv")  # one, or one for each head
    heads, turned = (
        keys.get_positive_int("attention.head_count"),
        keys.get_positive_int("rope.dimension_count"),
    )
    rank = "attention.q_lora_rank"
    return {
        "hidden_size": keys.get_positive_int("embedding_length"),
        "intermediate_size": keys.get_positive_int("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": keys.get_positive_int("context_length"),
        "rope_theta": keys.get_positive_float("rope.freq_base", 10000.0),
        "rope_scaling": yarn_mscale_rope_scaling(keys, share=0.1),
        "rms_norm_eps": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "q_lora_rank": keys.get_positive_int(rank) if rank in keys else None,
        "kv_lora_rank": keys.get_positive_int("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys.get_positive_int(f"attention.key_length{mla}") - turned,
        "v_head_dim": keys.get_positive_int(f"attention.value_length{mla}"),
        "attention_bias": keys.has_tensor("blk.0.attn_kv_a_mqa.bias"),
    }


GROUP_LIMITED_MOE_ARCHITECTURES = {
    "deepseek2": GgufArchitecture(
        DEEPSEEK_NAMES,
        read_config=_read_deepseek_config,
        joins_latent=True,
        chosen_types=("deepseek_v2", "deepseek_v3", "youtu"),
        alike_types=("kimi_k2", "glm4_moe_lite"),
    ),
    "glm4moe": GgufArchitecture(
        GLM4_MOE_NAMES,
        model_type="glm4_moe",
        read_config=_read_glm4_moe_config,
        alike_types=("solar_open",),
    ),
}
