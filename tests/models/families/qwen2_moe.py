"""Qwen2-MoE."""

from __future__ import annotations

from tests.models.moe_faults import moe_family

CASE = moe_family(
    "qwen2_moe",
    {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
     "shared_expert_intermediate_size": 56, "norm_topk_prob": True},
    (
        {"num_experts": 4, "num_experts_per_tok": 3}, {"norm_topk_prob": False},
        {"moe_intermediate_size": 24}, {"shared_expert_intermediate_size": 32},
        {"qkv_bias": False}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]},
        {"use_sliding_window": True, "sliding_window": 20},
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1,
         "num_hidden_layers": 3},
        {"use_sliding_window": True, "sliding_window": 20,
         "layer_types": ["full_attention", "sliding_attention"]},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
    ),
    {"num_experts_per_tok": 6, "num_experts": -1, "norm_topk_prob": 1,
     "mlp_only_layers": [2], "decoder_sparse_step": 0, "moe_intermediate_size": "x",
     "shared_expert_intermediate_size": 0, "qkv_bias": "x", "layer_types": ["full_attention"]},
)  # fmt: skip
