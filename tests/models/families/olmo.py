"""OLMo 1."""

from __future__ import annotations

from tests.models.family_cases import (
    ROPE_FAULT,
    ROTARY,
    GgufCase,
    decoder_family,
    fault,
    times,
)

CASE = decoder_family(
    "olmo",
    {"clip_qkv": 1.5},
    (
        {"attention_bias": True}, {"clip_qkv": None}, {"clip_qkv": 0.5}, {"hidden_act": "gelu"},
        {"tie_word_embeddings": True}, {"rms_norm_eps": 1e-3},
    ),
    {"attention_bias": 1, "clip_qkv": 0},
    {
        "RoPE base x 2": ROPE_FAULT,
        "eps x 10": fault("attn_norm.eps", eps=times(10)),
        "no clip": fault(ROTARY, qkv_clip=None),
        "clip x 1.5": fault("attn.qkv_clip.q_clipped", qkv_clip=times(1.5)),
    },
    gguf=GgufCase(
        "olmo",
        lambda raw: {
            "attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": raw.get("clip_qkv"),
        },
        permuted=True,
    ),
)  # fmt: skip
