"""Gemma 4, text."""

from __future__ import annotations

from tests.models.family_cases import SMALL, FamilyCase, size_switches

FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 2000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
EXPERTS = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40,
}  # fmt: skip

CASE = FamilyCase(
    "gemma4_text",
    {**SMALL, "num_hidden_layers": 6, "layer_types": TYPES, "head_dim": 16, "global_head_dim": 32,
     "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 20,
     "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 120,
     "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "rope_parameters": ROPE, **EXPERTS},
    (
        *size_switches(4, 1, num_hidden_layers=5)[:3],
        {"intermediate_size": 72}, {"vocab_size": 96}, {"max_position_embeddings": 128},
        {"hidden_activation": "silu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": False}, {"attention_bias": True}, {"sliding_window": 5},
        {"final_logit_softcapping": 3.0}, {"use_bidirectional_attention": "vision"},
    ),
    {},
    {},
)  # fmt: skip
