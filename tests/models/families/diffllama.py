"""DiffLlama."""

from __future__ import annotations

from tests.models.family_cases import decoder_family

CASE = decoder_family(
    "diffllama",
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    (
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 16}, {"lambda_std_dev": 0.3},
        {"num_attention_heads": 4},
    ),
    {"attention_bias": 1, "head_dim": 7, "num_key_value_heads": 1},
    {},
    sizes=(
        {"num_key_value_heads": 8}, {"num_key_value_heads": 2}, {"num_key_value_heads": None},
        {"hidden_size": 64, "intermediate_size": 72}, {"num_hidden_layers": 3},
        {"max_position_embeddings": 128}, {"vocab_size": 96},
    ),
)  # fmt: skip
