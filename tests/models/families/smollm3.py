"""SmolLM3."""

from __future__ import annotations

from tests.models.family_cases import (
    LLAMA_FAULTS,
    REFUSED,
    ROPES,
    ROTARY,
    SMALL,
    FamilyCase,
    GgufCase,
    fault,
    rms_facts,
)

CASE = FamilyCase(
    "smollm3",
    {**SMALL, "num_hidden_layers": 3, "no_rope_layer_interval": 2},
    (
        {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"hidden_size": 64},
        {"num_hidden_layers": 2}, {"intermediate_size": 72}, {"vocab_size": 96},
        {"max_position_embeddings": 128}, *ROPES,
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": False}, {"head_dim": 16},
        {"no_rope_layers": [0, 1, 1]}, {"no_rope_layers": [1, 1, 1]}, {"no_rope_layers": [0, 0, 0]},
        {"no_rope_layer_interval": 3}, {"no_rope_layer_interval": None},
        {"use_sliding_window": True, "sliding_window": 9},
        {"use_sliding_window": False, "sliding_window": 9},
        {"use_sliding_window": True, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    {**REFUSED, "no_rope_layers": [1], "no_rope_layer_interval": 0, "layer_types": ["mamba"],
     "attention_bias": 1, "mlp_bias": "x", "use_sliding_window": 3},
    {
        **LLAMA_FAULTS,
        "all layers rotated": fault(ROTARY, 1, unrotated_layers=frozenset()),
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
