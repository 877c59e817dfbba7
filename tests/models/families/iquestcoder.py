"""IQuest-Coder."""

from __future__ import annotations

from tests.models.family_cases import decoder_family

CASE = decoder_family(
    "iquestcoder",
    {"head_dim": 12},
    (
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"attention_bias": 1, "mlp_bias": "x", "head_dim": 7, "clip_qkv": 8.0,
     "use_sliding_window": True},
    {},
)  # fmt: skip
