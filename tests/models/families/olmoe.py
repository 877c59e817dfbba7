"""OLMoE."""

from __future__ import annotations

from tests.models.family_cases import (
    COMMON_SWITCHES,
    LLAMA_FAULTS,
    REFUSED,
    ROPES,
    SMALL,
    FamilyCase,
)
from tests.models.moe_faults import MOE_FAULTS, MOE_KV_TOLERANCE

CASE = FamilyCase(
    "olmoe",
    {**SMALL, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False},
    (
        *COMMON_SWITCHES, *ROPES,
        {"num_experts": 4, "num_experts_per_tok": 3}, {"norm_topk_prob": True},
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True},
    ),
    {**REFUSED, "num_experts_per_tok": 7, "num_experts": 0, "clip_qkv": 3.0,
     "norm_topk_prob": "x"},
    {**LLAMA_FAULTS, **MOE_FAULTS},
    kv_tolerance=MOE_KV_TOLERANCE,
)  # fmt: skip
