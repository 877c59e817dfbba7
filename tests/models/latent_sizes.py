"""Small sizes of the families with latent attention and grouped experts, and their switches."""

from __future__ import annotations

from typing import Any

from tests.models.family_cases import SMALL

LATENT_MOE_BASE: dict[str, Any] = {
    **SMALL, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24,
}  # fmt: skip
LATENT_MOE_SWITCHES: tuple[dict[str, Any], ...] = (
    {"vocab_size": 96}, {"hidden_size": 64}, {"max_position_embeddings": 128},
    {"num_attention_heads": 2, "num_key_value_heads": 2}, {"kv_lora_rank": 16},
    {"qk_nope_head_dim": 16}, {"qk_rope_head_dim": 4}, {"v_head_dim": 16},
    {"n_routed_experts": 4, "n_group": 2}, {"num_experts_per_tok": 1}, {"n_shared_experts": 2},
    {"moe_intermediate_size": 40}, {"norm_topk_prob": False}, {"n_group": 1, "topk_group": 1},
    {"rope_interleave": False}, {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"},
    {"tie_word_embeddings": True},
)  # fmt: skip
