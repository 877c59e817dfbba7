"""Solar Open."""

from __future__ import annotations

from typing import Any

from tests.models import family_cases
from tests.models.family_cases import COMMON_SWITCHES, GgufCase, decoder_family
from tests.models.grouped_gguf import router_facts, stacked
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF, which is GLM-4.5's without an MLP, norms of heads and prediction."""
    return {
        **family_cases.rms_facts(raw),
        **router_facts(raw, 2),
        "feed_forward_length": None,
        **family_cases.head_facts(raw),
        "rope.dimension_count": raw["head_dim"],
        "rope.freq_base": 1000000.0,
    }


CASE = decoder_family(
    "solar_open",
    {"intermediate_size": None, "head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 4,
     "n_group": 4, "topk_group": 2, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5},
    (
        {"rope_theta": 300.0}, {"partial_rotary_factor": 1.0},
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}, {"num_experts_per_tok": 1},
        {"n_group": 2, "topk_group": 1}, {"moe_intermediate_size": 24}, {"n_shared_experts": 2},
        {"routed_scaling_factor": 1.0}, {"norm_topk_prob": False}, {"attention_bias": True},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16}, {"hidden_size": 64},
    ),
    {"num_experts_per_tok": 5, "n_group": 3, "topk_group": 5, "n_routed_experts": 0,
     "moe_intermediate_size": "x", "n_shared_experts": 0, "norm_topk_prob": 1,
     "routed_scaling_factor": 0, "head_dim": 7, "attention_bias": 1, "use_qk_norm": True,
     "partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    GROUPED_ROUTER_FAULTS,
    sizes=tuple(each for each in COMMON_SWITCHES if "hidden_size" not in each),
    kv_tolerance=MOE_KV_TOLERANCE,
    gguf=GgufCase("glm4moe", gguf_facts, tensors=stacked),
)  # fmt: skip
