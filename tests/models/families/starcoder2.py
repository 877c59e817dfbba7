"""StarCoder2."""

from __future__ import annotations

from tests.models.family_cases import GgufCase, decoder_family, fault

CASE = decoder_family(
    "starcoder2",
    {},
    (
        {"use_bias": False}, {"hidden_act": "gelu"}, {"hidden_act": "relu"},
        {"norm_epsilon": 1e-3}, {"tie_word_embeddings": False}, {"head_dim": 16},
        {"sliding_window": 20}, {"sliding_window": 5, "num_key_value_heads": None},
        {"residual_dropout": 0.5, "embedding_dropout": 0.5},
    ),
    {"use_bias": 1, "sliding_window": 0, "norm_epsilon": -1},
    {
        "GELU without tanh": fault("mlp.act", activation="relu"),
        "no window": fault("attn.core", case={"sliding_window": 7}, windows=()),
    },
    gguf=GgufCase("starcoder2", lambda raw: {"attention.layer_norm_epsilon": 1e-5}),
)  # fmt: skip
