"""Mixtral."""

from __future__ import annotations

from tests.models.moe_faults import moe_family

CASE = moe_family(
    "mixtral",
    {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12},
    (
        {"num_local_experts": 3, "num_experts_per_tok": 3}, {"num_experts_per_tok": 1},
        {"sliding_window": 20}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"num_experts_per_tok": 6, "num_local_experts": 0, "sliding_window": "x"},
)  # fmt: skip
