"""Qwen3-MoE."""

from __future__ import annotations

from tests.models.moe_faults import moe_family

CASE = moe_family(
    "qwen3_moe",
    {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
     "norm_topk_prob": True},
    (
        {"num_experts": 4, "num_experts_per_tok": 3}, {"norm_topk_prob": False},
        {"moe_intermediate_size": 24}, {"attention_bias": True}, {"decoder_sparse_step": 2},
        {"mlp_only_layers": [1]}, {"use_sliding_window": True, "sliding_window": 20},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16},
    ),
    {"num_experts_per_tok": 7, "num_experts": "8", "norm_topk_prob": 1,
     "mlp_only_layers": "x", "decoder_sparse_step": 0, "moe_intermediate_size": 0},
)  # fmt: skip
