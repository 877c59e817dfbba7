"""AFM."""

from __future__ import annotations

from tests.models.family_cases import GgufCase, decoder_family, fault, rms_facts

CASE = decoder_family(
    "arcee",
    {},
    (
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"attention_bias": 1, "mlp_bias": "x", "head_dim": 7},
    {"ReLU": fault("mlp.act", activation="relu")},
    gguf=GgufCase("arcee", rms_facts, permuted=True, changes={"rms_norm_eps": 1e-5}),
)  # fmt: skip
