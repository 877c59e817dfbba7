"""Seed-OSS."""

from __future__ import annotations

from tests.models.family_cases import GgufCase, decoder_family, rms_facts

CASE = decoder_family(
    "seed_oss",
    {"head_dim": 12},
    (
        {"attention_bias": False}, {"attention_out_bias": True}, {"mlp_bias": True},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16}, {"residual_dropout": 0.5},
    ),
    {"attention_bias": 1, "attention_out_bias": "x", "mlp_bias": 1, "head_dim": 7},
    {},
    gguf=GgufCase("seed_oss", rms_facts, changes={"rms_norm_eps": 1e-5}),
)  # fmt: skip
