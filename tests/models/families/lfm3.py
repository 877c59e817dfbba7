"""LFM3."""

from __future__ import annotations

from dataclasses import replace

from tests.models.families.lfm2 import ConvWithSilu
from tests.models.family_cases import (
    GQA_SIZES,
    ROTARY,
    FamilyCase,
    based,
    decoder_family,
    fault,
    times,
)

LAYERS = ["conv", "sliding_attention", "full_attention"]
FULL = {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
WINDOWS = {"rope_type": "default", "rope_theta": 200.0}
ROPES = {"full_attention": FULL, "sliding_attention": WINDOWS}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip

CASE: FamilyCase = decoder_family(
    "lfm3",
    {"head_dim": 12, "num_hidden_layers": 3, "layer_types": LAYERS, "sliding_window": 20,
     "rope_parameters": ROPES},
    (
        {"num_hidden_layers": 5, "layer_types": None}, {"layer_types": LAYERS[::-1]},
        {"layer_types": ["conv", "conv", "full_attention"]}, {"sliding_window": 5},
        {"layer_types": ["full_attention"] * 3},
        {"rope_parameters": None}, {"rope_parameters": {**ROPES, "full_attention": WINDOWS}},
        {"rope_parameters": {**ROPES, "full_attention": {**FULL, "partial_rotary_factor": 0.25}}},
        {"rope_parameters": {**ROPES, "full_attention": YARN}},
        {"norm_eps": 1e-3}, {"tie_word_embeddings": False}, {"conv_bias": True},
        {"conv_L_cache": 4}, {"conv_L_cache": None}, {"head_dim": 16}, {"attention_bias": True},
        {"use_sandwich_norm": False}, {"use_attention_gate": False},
    ),
    {
        "conv_L_cache": 1, "conv_bias": 1, "layer_types": ["conv"], "norm_eps": "x",
        "sliding_window": 0, "use_sandwich_norm": 1, "use_attention_gate": "yes",
        "attention_bias": 1, "rope_parameters": {"full_attention": FULL}, "head_dim": 7,
        "rope_theta": 300.0, "rope_scaling": YARN,
    },
    {
        "RoPE base x 2": fault(ROTARY, 2, rope=based(2.0)),
        "RoPE base of windows x 2": fault(ROTARY, 1, local_rope=based(2.0)),
        "one rotation for all": fault(ROTARY, 1, local_rope=None),
        "a longer window": fault("attn.core", 1, windows=(None, 30, None)),
        "eps x 10": fault(("attn_norm.eps", "attn_post.eps"), eps=times(10)),
        "SiLU behind the convolution": fault(
            "attn.conv", recurrence=lambda spec: ConvWithSilu(**vars(spec))
        ),
        "a whole head rotated": fault(
            ROTARY, 2, rope=lambda rope: replace(rope, scaling={"rope_type": "default"})
        ),
    },
    ropes=(),
    sizes=GQA_SIZES,
)  # fmt: skip
