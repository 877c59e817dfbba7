"""Apertus."""

from __future__ import annotations

from tests.models.family_cases import LLAMA3, decoder_family

CASE = decoder_family(
    "apertus",
    {"rope_parameters": LLAMA3},
    (
        {"rope_parameters": None}, {"rope_parameters": {}},
        {"attention_bias": True}, {"hidden_act": "relu2"}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"attention_bias": 1, "head_dim": 7},
    {},
)  # fmt: skip
