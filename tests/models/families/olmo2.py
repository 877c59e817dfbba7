"""OLMo 2."""

from __future__ import annotations

from tests.models.family_cases import (
    QK_NORM,
    GgufCase,
    decoder_family,
    fault,
    rms_facts,
    times,
    with_eps,
)

CASE = decoder_family(
    "olmo2",
    {},
    (
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"attention_bias": 1, "rms_norm_eps": "x"},
    {
        "eps x 10": fault("attn_post.eps", eps=times(10)),
        "eps of q and k x 10": fault(QK_NORM, qkv_norm=with_eps(10)),
    },
    gguf=GgufCase("olmo2", rms_facts, changes={"rms_norm_eps": 1e-5}),
)  # fmt: skip
