"""GLM-4-0414."""

from __future__ import annotations

from tests.models.family_cases import (
    COMMON_SWITCHES,
    LLAMA_FAULTS,
    QK,
    REFUSED,
    ROPES,
    SMALL,
    FamilyCase,
    GgufCase,
    fault,
    rms_facts,
    times,
    with_dim,
)

CASE = FamilyCase(
    "glm4",
    {**SMALL, "head_dim": 16},
    (
        *COMMON_SWITCHES, *ROPES,
        {"attention_bias": False}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 12, "hidden_size": 48},
        {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ),
    {**REFUSED, "partial_rotary_factor": 0.1, "attention_bias": 1, "head_dim": 0},
    {
        **LLAMA_FAULTS,
        "half the rotated channels": fault(QK, rope=with_dim(4)),
        "the norms' eps x 10": fault(("attn_norm.eps", "attn_post.eps"), eps=times(10)),
    },
    gguf=GgufCase(
        "glm4",
        lambda raw: {
            **rms_facts(raw), "attention.key_length": raw["head_dim"],
            "rope.dimension_count": raw["head_dim"] // 2,
        },
        changes={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
