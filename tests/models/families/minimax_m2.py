"""MiniMax-M2."""

from __future__ import annotations

from typing import Any

from tests.models.family_cases import QK_NORM, GgufCase, fault, head_facts, with_eps
from tests.models.grouped_gguf import stacked
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, moe_family


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF."""
    return {
        "attention.layer_norm_rms_epsilon": 1e-6,
        **head_facts(raw),
        "rope.freq_base": 5000000.0,
        "rope.dimension_count": raw["rotary_dim"],
        "expert_count": raw["num_local_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_feed_forward_length": raw["intermediate_size"],
        "expert_gating_func": 2,
    }


CASE = moe_family(
    "minimax_m2",
    {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 6},
    (
        {"num_local_experts": 4, "num_experts_per_tok": 3}, {"rotary_dim": None},
        {"rotary_dim": 4}, {"rotary_dim": 6, "partial_rotary_factor": 1.0},
        {"rope_theta": 300.0},
        {"rotary_dim": None,
         "rope_parameters": {"rope_type": "default", "rope_theta": 300.0,
                             "partial_rotary_factor": 0.5}},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16}, {"attn_type_list": [1, 1]},
    ),
    {"num_experts_per_tok": 7, "num_local_experts": 0, "rotary_dim": 5, "head_dim": 7,
     "attn_type_list": [1, 0], "use_qk_norm": False, "scoring_func": "softmax",
     "use_routing_bias": False, "shared_intermediate_size": 24, "qk_norm_type": "per_head"},
    {
        **{n: f for n, f in GROUPED_ROUTER_FAULTS.items() if "group" not in n},
        "norms over q and k, eps x 100": fault(QK_NORM, qkv_norm=with_eps(100)),
    },
    ropes=(),
    gguf=GgufCase("minimax-m2", gguf_facts, tensors=stacked),
)  # fmt: skip
