"""Sarvam 105B."""

from __future__ import annotations

from tests.models.family_cases import LLAMA_FAULTS, SMALL, FamilyCase
from tests.models.latent_faults import LATENT_FAULTS, YARN
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE

PUBLISHED = {"n_routed_experts": None, "num_experts": 6, "num_shared_experts": 2,
             "n_group": None, "topk_group": None}  # fmt: skip

CASE = FamilyCase(
    "sarvam_mla",
    {**SMALL, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
     "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
     "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3},
        {"intermediate_size": 72, "first_k_dense_replace": 1}, {"first_k_dense_replace": None},
        {"max_position_embeddings": 128}, {"num_key_value_heads": None},
        {"num_attention_heads": 2, "num_key_value_heads": 2}, {"kv_lora_rank": 16},
        {"q_lora_rank": 12}, {"q_lora_rank": 12, "attention_bias": True},
        {"qk_nope_head_dim": 16}, {"qk_rope_head_dim": 4}, {"v_head_dim": 16},
        {"n_routed_experts": 4, "n_group": 2}, PUBLISHED, {"num_experts_per_tok": 1},
        {"n_shared_experts": 2}, {"moe_intermediate_size": 40}, {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False}, {"n_group": 1, "topk_group": 1}, {"rope_interleave": False},
        {"rope_scaling": YARN}, {"rope_scaling": {**YARN, "type": "deepseek_yarn"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True},
        {"num_mtp_layers": 1},
    ),
    {"is_encoder_decoder": True, "hidden_act": "quick_gelu", "num_experts_per_tok": 5,
     "n_routed_experts": 0, "n_group": 3, "topk_group": 5, "scoring_func": "softmax",
     "first_k_dense_replace": 3, "num_key_value_heads": 3, "kv_lora_rank": 0,
     "qk_rope_head_dim": 7, "rope_interleave": 1, "norm_topk_prob": 1, "num_experts": 6,
     "use_bias": True, "moe_router_enable_expert_bias": False},
    {**LLAMA_FAULTS, **LATENT_FAULTS, **GROUPED_ROUTER_FAULTS},
    kv_tolerance=MOE_KV_TOLERANCE,
)  # fmt: skip
