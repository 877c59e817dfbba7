"""Qwen3-Next."""

from __future__ import annotations

from tests.models.delta_net_faults import (
    DELTA_NET,
    DELTA_NET_FAULTS,
    DELTA_NET_REFUSED,
    DELTA_NET_SWITCHES,
)
from tests.models.family_cases import COMMON_SWITCHES, REFUSED, SMALL, FamilyCase
from tests.models.moe_faults import MOE_FAULTS, MOE_KV_TOLERANCE

CASE = FamilyCase(
    "qwen3_next",
    {
        **SMALL, **DELTA_NET, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24,
    },
    (
        *COMMON_SWITCHES, *DELTA_NET_SWITCHES,
        {"num_experts": 3, "num_experts_per_tok": 3}, {"norm_topk_prob": False},
        {"moe_intermediate_size": 24}, {"shared_expert_intermediate_size": 40},
        {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]},
    ),
    {
        **REFUSED, **DELTA_NET_REFUSED, "hidden_act": "gelu", "num_experts_per_tok": 5,
        "num_experts": "8", "norm_topk_prob": 1, "mlp_only_layers": "x",
        "decoder_sparse_step": 0, "moe_intermediate_size": 0,
    },
    {**DELTA_NET_FAULTS, **MOE_FAULTS},
    kv_tolerance=MOE_KV_TOLERANCE,
)  # fmt: skip
