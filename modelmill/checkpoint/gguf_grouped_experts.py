"""The GGUF architecture of GLM-4.5, whose experts are chosen as DeepSeek-V3's."""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import ArchitectureKeys, head_dim
from modelmill.checkpoint.gguf_families import LLAMA_NAMES, GgufArchitecture, read_rms_config
from modelmill.core.errors import UnknownArchitecture

SIGMOID_GATING = 2
"""Of ``expert_gating_func``."""
NEXTN_PARTS = (
    "eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm",
)  # fmt: skip
GLM4_MOE_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if gguf != "blk.ffn_norm"},
    "blk.post_attention_norm": "post_attention_layernorm",
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


def _glm4_moe(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read GLM-4.5; the layers of multi-token prediction are counted among the blocks."""
    gating = keys.get_count("expert_gating_func", SIGMOID_GATING)
    if gating != SIGMOID_GATING:
        raise UnknownArchitecture(
            f"{keys.raw.path}: expert_gating_func is {gating}; a glm4moe has sigmoids "
            f"({SIGMOID_GATING})"
        )
    config = read_rms_config(keys, partial=True)
    predicted = keys.get_count("nextn_predict_layers", 0)
    return {
        **config,
        "num_hidden_layers": config["num_hidden_layers"] - predicted,
        "head_dim": head_dim(keys, partial=True),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "n_routed_experts": keys.get_count("expert_count"),
        "num_experts_per_tok": keys.get_count("expert_used_count"),
        "n_shared_experts": keys.get_count("expert_shared_count"),
        "moe_intermediate_size": keys.get_count("expert_feed_forward_length"),
        "first_k_dense_replace": keys.get_count("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.get_positive_float("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get_flag("expert_weights_norm", True),
        "n_group": keys.get_count("expert_group_count", 1),
        "topk_group": keys.get_count("expert_group_used_count", 1),
    }


GROUPED_EXPERT_ARCHITECTURES = {
    "glm4moe": GgufArchitecture(GLM4_MOE_NAMES, model_type="glm4_moe", read_config=_glm4_moe),
}
