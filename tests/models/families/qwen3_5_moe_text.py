"""Qwen3.5 with experts, the language model."""

from __future__ import annotations

from tests.models.delta_net_faults import MROPE_SWITCH, with_delta_net
from tests.models.delta_net_gguf import with_gguf
from tests.models.family_cases import COMMON_SWITCHES
from tests.models.moe_faults import moe_family

CASE = with_gguf(with_delta_net(moe_family(
    "qwen3_5_moe_text",
    {"intermediate_size": None, "num_experts": 4, "num_experts_per_tok": 2,
     "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24},
    (
        MROPE_SWITCH, {"hidden_size": 64}, {"num_experts": 3, "num_experts_per_tok": 3},
        {"moe_intermediate_size": 24}, {"shared_expert_intermediate_size": 40},
    ),
    {"num_experts_per_tok": 5, "num_experts": "8", "moe_intermediate_size": 0},
    sizes=tuple(each for each in COMMON_SWITCHES if "intermediate_size" not in each),
    ropes=(),
)), "qwen35moe")  # fmt: skip
