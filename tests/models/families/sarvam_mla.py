"""Sarvam 105B."""

from __future__ import annotations

from tests.models.family_cases import LLAMA_FAULTS, FamilyCase
from tests.models.latent_faults import LATENT_FAULTS, YARN
from tests.models.latent_sizes import LATENT_MOE_BASE, LATENT_MOE_SWITCHES
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE

PUBLISHED = {"n_routed_experts": None, "num_experts": 6, "num_shared_experts": 2,
             "n_group": None, "topk_group": None}  # fmt: skip

CASE = FamilyCase(
    "sarvam_mla",
    {key: value for key, value in LATENT_MOE_BASE.items() if key != "q_lora_rank"}
    | {"first_k_dense_replace": 0},
    (
        *LATENT_MOE_SWITCHES, PUBLISHED, {"num_hidden_layers": 3}, {"num_key_value_heads": None},
        {"intermediate_size": 72, "first_k_dense_replace": 1}, {"first_k_dense_replace": None},
        {"q_lora_rank": 12}, {"q_lora_rank": 12, "attention_bias": True},
        {"routed_scaling_factor": 1.0}, {"num_mtp_layers": 1},
        {"rope_scaling": YARN}, {"rope_scaling": {**YARN, "type": "deepseek_yarn"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    ),
    {"is_encoder_decoder": True, "hidden_act": "quick_gelu", "num_experts_per_tok": 5,
     "n_routed_experts": 0, "n_group": 3, "topk_group": 5, "scoring_func": "softmax",
     "first_k_dense_replace": 3, "num_key_value_heads": 3, "kv_lora_rank": 0,
     "qk_rope_head_dim": 7, "rope_interleave": 1, "norm_topk_prob": 1, "num_experts": 6,
     "use_bias": True, "moe_router_enable_expert_bias": False},
    {**LLAMA_FAULTS, **LATENT_FAULTS, **GROUPED_ROUTER_FAULTS},
    kv_tolerance=MOE_KV_TOLERANCE,
)  # fmt: skip
