"""GLM-4 9B and GLM-Edge."""

from __future__ import annotations

from tests.models.family_cases import QK, GgufCase, decoder_family, fault, rms_facts, with_dim

CASE = decoder_family(
    "glm",
    {"head_dim": 16},
    (
        {"attention_bias": False}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 12, "hidden_size": 48},
        {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ),
    {"partial_rotary_factor": 0.1, "attention_bias": 1, "head_dim": 0},
    {
        "half the rotated channels": fault(QK, rope=with_dim(4)),
    },
    gguf=GgufCase(
        "chatglm",
        lambda raw: {**rms_facts(raw), "rope.dimension_count": 6},
        changes={"head_dim": 12, "rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
