"""Jais 2."""

from __future__ import annotations

from tests.models.family_cases import GgufCase, decoder_family, fault

CASE = decoder_family(
    "jais2",
    {"head_dim": 12},
    (
        {"attention_bias": False}, {"mlp_bias": False}, {"hidden_act": "gelu"},
        {"layer_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"attention_bias": 1, "mlp_bias": "x", "layer_norm_eps": "x", "head_dim": 7},
    {"ReLU": fault("mlp.act", activation="relu")},
    gguf=GgufCase(
        "jais2",
        lambda raw: {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 12},
    ),
)  # fmt: skip
