"""Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

from tests.models.families.phi3 import LONG, SHORT
from tests.models.family_cases import ROTARY, fault, with_scaling
from tests.models.moe_faults import ROUTING, moe_family, with_router

TRAINED = {"original_max_position_embeddings": 128}
LONGROPE: dict[str, Any] = {
    "type": "longrope", "short_factor": SHORT, "long_factor": LONG, "short_mscale": 1.2,
    "long_mscale": 1.2, **TRAINED,
}  # fmt: skip

CASE = moe_family(
    "phimoe",
    # noise that makes rivals of some experts
    {"num_local_experts": 4, "router_jitter_noise": 0.2, "rope_scaling": LONGROPE},
    (
        {"num_local_experts": 6}, {"num_local_experts": 2}, {"num_experts_per_tok": 2},
        {"router_jitter_noise": 0.0}, {"router_jitter_noise": None},
        {"router_jitter_noise": 0.6}, {"input_jitter_noise": 0.1},
        {"attention_bias": True}, {"lm_head_bias": True}, {"sliding_window": 20},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16, "rope_scaling": None},
    ),
    {
        "num_experts_per_tok": 3, "num_local_experts": 0, "router_jitter_noise": -1,
        "attention_bias": 1, "lm_head_bias": 1, "sliding_window": -1,
        "rope_scaling": LONGROPE | {"long_mscale": 1.3}, "num_experts": 5,
    },
    {
        "softmax of all": fault(ROUTING, moe=with_router(scores="softmax")),
        "softmax of all, renormalized": fault(
            ROUTING, moe=with_router(scores="softmax", renormalize=True)
        ),
        "half the noise": fault(ROUTING, moe=with_router(jitter=0.1)),
        "no noise": fault(ROUTING, moe=with_router(jitter=0.0)),
        "long factors for short": fault(ROTARY, rope=with_scaling(short_factor=LONG)),
        "no temperature": fault(ROTARY, rope=with_scaling(attention_factor=1.0)),
    },
    kv_tolerance=0.3,  # a rival more or less changes a weight at once
    sizes=(
        {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"intermediate_size": 72},
        {"num_hidden_layers": 3}, {"max_position_embeddings": 512}, {"vocab_size": 96},
        {"hidden_size": 64, "rope_scaling": None},
    ),
    ropes=(
        {"rope_scaling": None}, {"rope_scaling": None, "rope_theta": 300.0},
        {"rope_scaling": None, "rope_parameters": {**LONGROPE, "rope_type": "longrope",
                                                   "rope_theta": 300.0}},
        {"rope_scaling": LONGROPE | {"short_mscale": 0.9, "long_mscale": 0.9}},
    ),
)  # fmt: skip
