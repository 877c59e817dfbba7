"""Sarvam 30B."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import Tensors, stack_experts
from tests.models.family_cases import GgufCase, decoder_family, head_facts, rms_facts
from tests.models.grouped_gguf import predicting_layer_facts, router_facts, with_predicting_layer
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE

PUBLISHED = {"n_routed_experts": None, "num_experts": 8, "num_shared_experts": 2,
             "use_qkv_bias": True}  # fmt: skip


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF; a layer that predicts is counted among the blocks."""
    return {
        **predicting_layer_facts(raw),
        **rms_facts(raw),
        **router_facts(raw, 2),
        "expert_shared_feed_forward_length": raw["moe_intermediate_size"],
        **head_facts(raw),
        "rope.dimension_count": raw["head_dim"],
    }


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """With a layer of multi-token prediction, and the bias of the choice less its mean."""
    made = {
        name.replace(".expert_bias", ".expert_bias.bias"): tensor - tensor.mean()
        if name.endswith(".expert_bias")
        else tensor
        for name, tensor in stack_experts(tensors).items()
    }
    return with_predicting_layer(raw, made, 1)


CASE = decoder_family(
    "sarvam_moe",
    {"head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
     "topk_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 0,
     "routed_scaling_factor": 1.5},
    (
        {"rope_theta": 300.0}, {"partial_rotary_factor": 0.5}, {"head_dim": 16},
        {"use_qk_norm": False}, {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        PUBLISHED, {"num_experts_per_tok": 1}, {"n_group": 2, "topk_group": 1},
        {"moe_intermediate_size": 24}, {"n_shared_experts": 2}, {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False}, {"first_k_dense_replace": 1}, {"first_k_dense_replace": None},
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"num_mtp_layers": 1},
    ),
    {"num_experts_per_tok": 5, "n_group": 3, "topk_group": 5, "n_routed_experts": 0,
     "first_k_dense_replace": 3, "moe_intermediate_size": "x", "use_qk_norm": 1,
     "n_shared_experts": 0, "norm_topk_prob": 1, "routed_scaling_factor": 0, "head_dim": 7,
     "num_experts": 6, "use_qkv_bias": 1, "use_bias": True},
    GROUPED_ROUTER_FAULTS,
    kv_tolerance=MOE_KV_TOLERANCE,
    gguf=GgufCase(
        "bailingmoe2", gguf_facts, tensors=as_converted,
        changes={"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_theta": 300.0,
                 "rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
