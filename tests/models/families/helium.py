"""Helium."""

from __future__ import annotations

from tests.models.family_cases import COMMON_SWITCHES, decoder_family

CASE = decoder_family(
    "helium",
    {"head_dim": 12, "rms_norm_eps": 1e-6},
    (
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"hidden_size": 64, "head_dim": 16},
    ),
    {"attention_bias": 1, "mlp_bias": "x", "head_dim": 7},
    {},
    sizes=tuple(each for each in COMMON_SWITCHES if "hidden_size" not in each),
)  # fmt: skip
