"""MiniMax-M2."""

from __future__ import annotations

from tests.models.family_cases import QK_NORM, fault, with_eps
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, moe_family

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
)  # fmt: skip
