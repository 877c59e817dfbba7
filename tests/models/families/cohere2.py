"""Command R7B and Command A."""

from __future__ import annotations

from tests.models.family_cases import ALL_ROTATED, GgufCase, decoder_family, fault, times

CASE = decoder_family(
    "cohere2",
    {"num_hidden_layers": 3, "sliding_window": 20, "sliding_window_pattern": 2},
    (
        {"num_key_value_heads": None}, {"sliding_window": None}, {"sliding_window": 5},
        {"sliding_window_pattern": None},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"attention_bias": True}, {"logit_scale": 0.5}, {"logit_scale": None}, {"head_dim": 16},
        {"hidden_act": "gelu"}, {"layer_norm_eps": 1e-3}, {"tie_word_embeddings": False},
    ),
    {"layer_types": ["mamba"], "logit_scale": 0, "sliding_window": 0,
     "sliding_window_pattern": "x", "attention_bias": 1},
    {
        "all layers rotated": ALL_ROTATED,
        "logits x 1.05": fault("head", None, logit_scale=times(1.05)),
        "a longer window": fault("attn.core", windows=(30, None, 30)),
    },
    gguf=GgufCase(
        "cohere2",
        lambda raw: {
            "attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.0625,
            "attention.sliding_window": raw["sliding_window"],
        },
        changes={"num_hidden_layers": 4, "sliding_window_pattern": 4},
    ),
)  # fmt: skip
