"""gpt-oss, its experts in float."""

from __future__ import annotations

from dataclasses import replace

from modelmill.ops.fused_moe import SwigluOaiParams
from tests.models.family_cases import (
    LLAMA_FAULTS,
    SMALL,
    Change,
    FamilyCase,
    fault,
    size_switches,
    with_scaling,
)
from tests.models.moe_faults import MOE_FAULTS, MOE_KV_TOLERANCE

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 4.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64}  # fmt: skip


def clamped(alpha: float, limit: float) -> Change:
    """Another gate of the experts."""
    clamp = SwigluOaiParams(alpha, limit)
    return lambda moe: replace(moe, expert=replace(moe.expert, clamp=clamp))


CASE = FamilyCase(
    "gpt_oss",
    {**SMALL, "num_hidden_layers": 3, "head_dim": 12, "num_local_experts": 5,
     "num_experts_per_tok": 2, "sliding_window": 20, "swiglu_limit": 0.7, "rope_parameters": YARN},
    (
        *size_switches(4, 1), {"head_dim": 16}, {"sliding_window": 5},
        {"num_local_experts": 3, "num_experts_per_tok": 3}, {"num_experts_per_tok": 1},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"rope_parameters": YARN | {"truncate": True}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"swiglu_alpha": 1.0}, {"swiglu_limit": 7.0}, {"attention_bias": False},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
    ),
    {"is_encoder_decoder": True, "hidden_act": "gelu", "num_experts_per_tok": 6,
     "num_local_experts": 0, "layer_types": ["mamba"], "sliding_window": 0, "swiglu_limit": 0,
     "swiglu_alpha": -1, "attention_bias": 1},
    {
        **LLAMA_FAULTS,
        **{name: each for name, each in MOE_FAULTS.items() if "sigmoid" not in name},
        "window + 1": fault("attn.core", windows=(21, None, 21)),
        "window - 1": fault("attn.core", windows=(19, None, 19)),
        "windows in the other layers": fault("attn.core", windows=(None, 20, None)),
        "YaRN's ramp truncated": fault(
            ("attn.rope_cache.q", "attn.rope_cache.k"), rope=with_scaling(truncate=True)
        ),
        "alpha of SiLU": fault("mlp.experts.0.act", moe=clamped(1.0, 0.7)),
        "limit x 1.5": fault("mlp.experts.0.act", moe=clamped(1.702, 1.05)),
        "no limit": fault("mlp.experts.0.act", moe=clamped(1.702, 1e9)),
    },
    kv_tolerance=MOE_KV_TOLERANCE,
)  # fmt: skip
