"""InternLM3."""

from __future__ import annotations

from tests.models.family_cases import COMMON_SWITCHES, decoder_family

CASE = decoder_family(
    "internlm3",
    {"head_dim": 12},
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40},
        {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "bias": True},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16}, {"hidden_size": 64},
    ),
    {"bias": 1, "qkv_bias": "x", "mlp_bias": 1, "attention_bias": "x", "head_dim": 3},
    {},
    sizes=(*COMMON_SWITCHES[:2], *COMMON_SWITCHES[3:]),
)  # fmt: skip
