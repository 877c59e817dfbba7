"""ERNIE 4.5, dense."""

from __future__ import annotations

from tests.models.family_cases import (
    COMMON_SWITCHES,
    LLAMA_FAULTS,
    REFUSED,
    ROPES,
    SMALL,
    FamilyCase,
    GgufCase,
    rms_facts,
)

CASE = FamilyCase(
    "ernie4_5",
    {**SMALL, "head_dim": 16},
    (
        *COMMON_SWITCHES, *ROPES,
        {"use_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": False}, {"head_dim": 12},
    ),
    {**REFUSED, "use_bias": 1, "head_dim": 5},
    LLAMA_FAULTS,
    gguf=GgufCase(
        "ernie4_5", lambda raw: {**rms_facts(raw), "attention.key_length": raw["head_dim"]},
        changes={"rope_theta": 10000.0, "rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
