"""EXAONE 4."""

from __future__ import annotations

from tests.models.family_cases import ALL_ROTATED, GgufCase, decoder_family, fault, rms_facts, times

CASE = decoder_family(
    "exaone4",
    {"num_hidden_layers": 3, "sliding_window": 20, "sliding_window_pattern": 2},
    (
        {"sliding_window": 5}, {"sliding_window_pattern": None},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "sliding_window_pattern": "LG"},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16},
    ),
    {"layer_types": ["mamba"], "sliding_window": 0, "sliding_window_pattern": "LLLG"},
    {
        "eps x 10": fault(
            ("attn_post.eps", "attn.rope_cache.eps", "attn.rope_cache.q"), eps=times(10)),
        "all layers rotated": ALL_ROTATED,
        "a longer window": fault("attn.core", windows=(30, None, 30)),
    },
    gguf=GgufCase(
        "exaone4",
        lambda raw: {
            **rms_facts(raw), "attention.sliding_window": raw["sliding_window"],
            "attention.sliding_window_pattern": [True, True, False],
        },
        changes={"sliding_window_pattern": 3, "rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
