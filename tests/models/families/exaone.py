"""EXAONE 3 and 3.5."""

from __future__ import annotations

from tests.models.family_cases import GgufCase, decoder_family, rms_facts

CASE = decoder_family(
    "exaone",
    {"num_key_value_heads": 2},
    (
        {"rope_theta": 300.0}, {"attention_bias": True}, {"mlp_bias": True},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16},
        # as published files name them
        {"num_hidden_layers": None, "num_layers": 3, "layer_norm_epsilon": 1e-3,
         "activation_function": "relu"},
    ),
    {"attention_bias": 1, "mlp_bias": "x", "head_dim": 7, "num_layers": 3,
     "activation_function": "quick_gelu", "sliding_window": 16},
    {},
    gguf=GgufCase(
        "exaone",
        lambda raw: {**rms_facts(raw), "rope.dimension_count": 12},
        changes={"rms_norm_eps": 1e-5, "rope_theta": 300.0, "tie_word_embeddings": True},
    ),
)  # fmt: skip
