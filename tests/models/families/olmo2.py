"""OLMo 2."""

from __future__ import annotations

from tests.models.family_cases import (
    COMMON_SWITCHES,
    QK_NORM,
    REFUSED,
    ROPE_FAULT,
    ROPES,
    SMALL,
    FamilyCase,
    GgufCase,
    fault,
    rms_facts,
    times,
    with_eps,
)

CASE = FamilyCase(
    "olmo2",
    SMALL,
    (
        *COMMON_SWITCHES, *ROPES,
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {**REFUSED, "attention_bias": 1, "rms_norm_eps": "x"},
    {
        "RoPE base x 2": ROPE_FAULT,
        "eps x 10": fault("attn_post.eps", eps=times(10)),
        "eps of q and k x 10": fault(QK_NORM, qkv_norm=with_eps(10)),
    },
    gguf=GgufCase("olmo2", rms_facts, changes={"rms_norm_eps": 1e-5}),
)  # fmt: skip
