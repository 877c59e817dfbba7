"""SmolLM3."""

from __future__ import annotations

from tests.models.family_cases import (
    ALL_ROTATED,
    ROTARY,
    GgufCase,
    decoder_family,
    fault,
    rms_facts,
)

CASE = decoder_family(
    "smollm3",
    {"num_hidden_layers": 3, "no_rope_layer_interval": 2},
    (
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": False}, {"head_dim": 16},
        {"no_rope_layers": [0, 1, 1]}, {"no_rope_layers": [1, 1, 1]}, {"no_rope_layers": [0, 0, 0]},
        {"no_rope_layer_interval": 3}, {"no_rope_layer_interval": None},
        {"use_sliding_window": True, "sliding_window": 9},
        {"use_sliding_window": False, "sliding_window": 9},
        {"use_sliding_window": True, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    {"no_rope_layers": [1], "no_rope_layer_interval": 0, "layer_types": ["mamba"],
     "attention_bias": 1, "mlp_bias": "x", "use_sliding_window": 3},
    {
        "all layers rotated": ALL_ROTATED,
        "another layer unrotated": fault(
            (*ROTARY, "attn.core"), unrotated_layers=frozenset((0,))
        ),
    },
    gguf=GgufCase(
        "smollm3", rms_facts, permuted=True,
        changes={"num_hidden_layers": 4, "no_rope_layer_interval": 4, "rope_theta": 10000.0,
                 "rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
