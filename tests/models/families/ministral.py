"""Ministral 8B."""

from __future__ import annotations

from tests.models.family_cases import GQA_SIZES, decoder_family, fault

CASE = decoder_family(
    "ministral",
    {"num_hidden_layers": 3, "head_dim": 12, "sliding_window": 20,
     "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    (
        {"sliding_window": 5}, {"layer_types": None},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
        {"hidden_act": "gelu"},
    ),
    {"layer_types": ["mamba"], "sliding_window": 0, "head_dim": 7, "hidden_act": "quick_gelu"},
    {
        "windows in all layers": fault("attn.core", windows=(20, 20, 20)),
        "a longer window": fault("attn.core", 1, windows=(None, 30, None)),
    },
    sizes=(
        *GQA_SIZES,
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
)  # fmt: skip
