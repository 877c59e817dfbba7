"""BitNet b1.58."""

from __future__ import annotations

from tests.models.family_cases import decoder_family, fault

CASE = decoder_family(
    "bitnet",
    {},
    (
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"hidden_act": "silu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 12},
        {"num_attention_heads": 10, "num_key_value_heads": None, "hidden_size": 60},
    ),
    {"attention_bias": 1, "head_dim": 16},
    {"ReLU": fault("mlp.act", activation="relu")},
)  # fmt: skip
