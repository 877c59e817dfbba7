"""Qwen3.5 with experts, the language model."""

from __future__ import annotations

from tests.models.delta_net_faults import (
    DELTA_NET,
    DELTA_NET_FAULTS,
    DELTA_NET_REFUSED,
    DELTA_NET_SWITCHES,
    MROPE_SWITCH,
)
from tests.models.family_cases import COMMON_SWITCHES, REFUSED, SMALL, FamilyCase
from tests.models.moe_faults import MOE_FAULTS, MOE_KV_TOLERANCE

CASE = FamilyCase(
    "qwen3_5_moe_text",
    {
        **{key: value for key, value in SMALL.items() if key != "intermediate_size"}, **DELTA_NET,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
    },
    (
        *(each for each in COMMON_SWITCHES if "intermediate_size" not in each),
        *DELTA_NET_SWITCHES, MROPE_SWITCH, {"hidden_size": 64},
        {"num_experts": 3, "num_experts_per_tok": 3}, {"moe_intermediate_size": 24},
        {"shared_expert_intermediate_size": 40},
    ),
    {
        **REFUSED, **DELTA_NET_REFUSED, "hidden_act": "gelu", "num_experts_per_tok": 5,
        "num_experts": "8", "moe_intermediate_size": 0,
    },
    {**DELTA_NET_FAULTS, **MOE_FAULTS},
    kv_tolerance=MOE_KV_TOLERANCE,
)  # fmt: skip
