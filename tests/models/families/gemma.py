"""Gemma 1."""

from __future__ import annotations

from tests.models.family_cases import (
    GgufCase,
    decoder_family,
    fault,
    gemma_facts,
    norms_plus_one,
    times,
)

CASE = decoder_family(
    "gemma",
    {"head_dim": 16},
    (
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"hidden_act": "silu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": False}, {"head_dim": 12},
    ),
    {"attention_bias": 1, "use_bidirectional_attention": True, "head_dim": 7},
    {
        "embeddings x 1.05": fault("embed", None, embedding_scale=times(1.05)),
        "exact GELU": fault("mlp.act", activation="silu"),
    },
    gguf=GgufCase("gemma", gemma_facts, tensors=norms_plus_one),
)  # fmt: skip
