"""GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from tests.models import grouped_gguf
from tests.models.expert_gguf import Tensors
from tests.models.family_cases import LLAMA_FAULTS, NULL, FamilyCase, GgufCase
from tests.models.latent_faults import LATENT_FAULTS, YARN
from tests.models.latent_sizes import LATENT_MOE_BASE, LATENT_MOE_SWITCHES
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF; a layer that predicts is counted among the blocks."""
    facts = grouped_gguf.latent_facts(raw, 2) | grouped_gguf.predicting_layer_facts(raw)
    return {**facts, "leading_dense_block_count": 1}


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """With a layer that predicts."""
    return grouped_gguf.with_predicting_layer(
        raw, grouped_gguf.latent_as_converted(raw, tensors), 1
    )


CASE = FamilyCase(
    "glm4_moe_lite",
    LATENT_MOE_BASE | {"mlp_layer_types": ["sparse", "sparse"]},
    (
        *LATENT_MOE_SWITCHES, {"num_hidden_layers": 3, "mlp_layer_types": None},
        {"intermediate_size": 72, "mlp_layer_types": ["dense", "sparse"]},
        {"q_lora_rank": 12}, {"q_lora_rank": NULL}, {"attention_bias": True},
        {"routed_scaling_factor": 1.0}, {"head_dim": 8}, {"rope_scaling": YARN},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"num_mtp_layers": 0}, {"mlp_layer_types": None, "first_k_dense_replace": 1},
        {"mlp_layer_types": ["sparse", "dense"]},
    ),
    {"is_encoder_decoder": True, "hidden_act": "quick_gelu", "num_experts_per_tok": 5,
     "n_routed_experts": 0, "n_group": 3, "topk_group": 5, "topk_method": "greedy",
     "scoring_func": "softmax", "mlp_layer_types": ["moe", "dense"], "num_key_value_heads": 3,
     "kv_lora_rank": 0, "head_dim": 16, "qk_rope_head_dim": 7, "rope_interleave": 1,
     "norm_topk_prob": 1},
    {**LLAMA_FAULTS, **LATENT_FAULTS, **GROUPED_ROUTER_FAULTS},
    kv_tolerance=MOE_KV_TOLERANCE,
    gguf=GgufCase(
        "deepseek2", gguf_facts, tensors=as_converted,
        changes={"rope_scaling": grouped_gguf.GGUF_YARN, "mlp_layer_types": ["dense", "sparse"],
                 "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5},
    ),
)  # fmt: skip
