"""GLM-4-0414."""

from __future__ import annotations

from dataclasses import replace

from tests.models.families import glm
from tests.models.family_cases import GgufCase, fault, rms_facts, times

CASE = replace(
    glm.CASE,
    model_type="glm4",
    faults={
        **glm.CASE.faults,
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
