"""ERNIE 4.5, dense."""

from __future__ import annotations

from tests.models.family_cases import GgufCase, decoder_family, rms_facts

CASE = decoder_family(
    "ernie4_5",
    {"head_dim": 16},
    (
        {"use_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": False}, {"head_dim": 12},
    ),
    {"use_bias": 1, "head_dim": 5},
    {},
    gguf=GgufCase(
        "ernie4_5", lambda raw: {**rms_facts(raw), "attention.key_length": raw["head_dim"]},
        changes={"rope_theta": 10000.0, "rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
