"""GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import Tensors
from tests.models.family_cases import LLAMA_FAULTS, NULL, SMALL, FamilyCase, GgufCase
from tests.models.grouped_gguf import (
    GGUF_YARN,
    latent_as_converted,
    latent_facts,
    with_predicting_layer,
)
from tests.models.latent_faults import LATENT_FAULTS, YARN
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF; a layer that predicts is counted among the blocks."""
    layers = {"block_count": raw["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    return {**latent_facts(raw, 2), **layers, "leading_dense_block_count": 1}


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """With a layer that predicts."""
    return with_predicting_layer(raw, latent_as_converted(raw, tensors), 1)


CASE = FamilyCase(
    "glm4_moe_lite",
    {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    | {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
       "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
       "topk_group": 2, "moe_intermediate_size": 24, "mlp_layer_types": ["sparse", "sparse"],
       "num_key_value_heads": 4},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3, "mlp_layer_types": None},
        {"intermediate_size": 72, "mlp_layer_types": ["dense", "sparse"]},
        {"max_position_embeddings": 128},
        {"num_attention_heads": 2, "num_key_value_heads": 2}, {"kv_lora_rank": 16},
        {"q_lora_rank": 12}, {"attention_bias": True}, {"qk_nope_head_dim": 16},
        {"qk_rope_head_dim": 4}, {"v_head_dim": 16}, {"n_routed_experts": 4, "n_group": 2},
        {"num_experts_per_tok": 1}, {"n_shared_experts": 2}, {"moe_intermediate_size": 40},
        {"routed_scaling_factor": 1.0}, {"norm_topk_prob": False}, {"n_group": 1, "topk_group": 1},
        {"rope_interleave": False}, {"head_dim": 8}, {"rope_scaling": YARN}, {"q_lora_rank": NULL},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True},
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
        changes={"rope_scaling": GGUF_YARN, "mlp_layer_types": ["dense", "sparse"],
                 "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5},
    ),
)  # fmt: skip
