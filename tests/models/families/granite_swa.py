"""Granite with windows."""

from __future__ import annotations

from tests.models.family_cases import ALL_ROTATED, decoder_family, fault, times

CASE = decoder_family(
    "granite_swa",
    {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
     "logits_scaling": 4.0, "sliding_window": 20, "num_hidden_layers": 3,
     "layer_rope_theta": [10000.0, 0, 10000.0]},
    (
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": False}, {"head_dim": 16},
        {"sliding_window": 5}, {"layer_rope_theta": None}, {"layer_rope_theta": [0, 0, 300.0]},
        {"layer_rope_theta": [0, 0, 0]}, {"layer_rope_theta": [300.0, 0, 50.0]},
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {"num_hidden_layers": 5, "layer_rope_theta": None},
    ),
    {"residual_multiplier": "0.5", "logits_scaling": 0.0, "attention_bias": 1,
     "layer_rope_theta": [0, 20.0, 30.0], "sliding_window": 0, "layer_types": ["mamba"]},
    {
        "no factor on scores": fault("attn.core", attention_scale=None),
        "branches x 1.05": fault("attn_post", branch_scale=times(1.05)),
        "a longer window": fault("attn.core", 1, windows=(None, 30, 20)),
        "all layers rotate": ALL_ROTATED,
    },
    sizes=(
        {"num_key_value_heads": 4}, {"num_key_value_heads": 1},
        {"hidden_size": 64, "intermediate_size": 72},
        {"num_hidden_layers": 2, "layer_rope_theta": [10000.0, 0]},
        {"max_position_embeddings": 128}, {"vocab_size": 96},
    ),
)  # fmt: skip
