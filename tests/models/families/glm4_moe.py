"""GLM-4.5."""

from __future__ import annotations

from typing import Any

from tests.models import grouped_gguf
from tests.models.expert_gguf import Tensors
from tests.models.family_cases import GgufCase, decoder_family, head_facts, rms_facts
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE


def facts(raw: dict[str, Any]) -> dict[str, Any]:
    """Of half a head that rotates, the router, and a layer of multi-token prediction."""
    return {
        **grouped_gguf.predicting_layer_facts(raw),
        **rms_facts(raw),
        **grouped_gguf.router_facts(raw, 2),
        **head_facts(raw),
        "rope.dimension_count": raw["head_dim"] // 2,
    }


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """With a layer of multi-token prediction."""
    return grouped_gguf.with_predicting_layer(raw, grouped_gguf.stacked(raw, tensors), 1)


CASE = decoder_family(
    "glm4_moe",
    {"head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
     "topk_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 0,
     "routed_scaling_factor": 1.5, "use_qk_norm": True},
    (
        {"rope_theta": 300.0},
        {"partial_rotary_factor": 1.0}, {"head_dim": 16}, {"use_qk_norm": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}, {"num_experts_per_tok": 1},
        {"n_group": 2, "topk_group": 1}, {"moe_intermediate_size": 24}, {"n_shared_experts": 2},
        {"routed_scaling_factor": 1.0}, {"norm_topk_prob": False}, {"first_k_dense_replace": 1},
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"num_mtp_layers": 0},
    ),
    {"num_experts_per_tok": 5, "n_group": 3, "topk_group": 5, "n_routed_experts": 0,
     "first_k_dense_replace": 3, "moe_intermediate_size": "x", "use_qk_norm": 1,
     "n_shared_experts": 0, "norm_topk_prob": 1, "routed_scaling_factor": 0, "head_dim": 7},
    GROUPED_ROUTER_FAULTS,
    ropes=(),
    kv_tolerance=MOE_KV_TOLERANCE,
    gguf=GgufCase(
        "glm4moe", facts, changes={"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        tensors=as_converted,
    ),
)  # fmt: skip
