"""Granite with experts and an MLP beside them."""

from __future__ import annotations

from tests.models.moe_faults import moe_family

CASE = moe_family(
    "granitemoeshared",
    {"num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
     "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 4.0,
     "shared_intermediate_size": 24},
    (
        {"num_local_experts": 3, "num_experts_per_tok": 3}, {"attention_bias": True},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"embedding_multiplier": 1.0, "attention_multiplier": 0.3, "residual_multiplier": 1.0,
         "logits_scaling": 1.0},
        {"shared_intermediate_size": 40}, {"shared_intermediate_size": 0},
        {"shared_intermediate_size": None},
    ),
    {"num_experts_per_tok": 6, "num_local_experts": 0, "residual_multiplier": "x",
     "shared_intermediate_size": -1},
)  # fmt: skip
