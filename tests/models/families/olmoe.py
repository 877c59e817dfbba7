"""OLMoE."""

from __future__ import annotations

from tests.models.moe_faults import moe_family

CASE = moe_family(
    "olmoe",
    {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False},
    (
        {"num_experts": 4, "num_experts_per_tok": 3}, {"norm_topk_prob": True},
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"clip_qkv": 0.7},
    ),
    {"num_experts_per_tok": 7, "num_experts": 0, "clip_qkv": 0,
     "norm_topk_prob": "x"},
)  # fmt: skip
