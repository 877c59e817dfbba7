"""Nemotron-4 and Minitron."""

from __future__ import annotations

from tests.models.family_cases import GgufCase, decoder_family, fault, size_switches

CASE = decoder_family(
    "nemotron",
    {"hidden_size": 64},
    (
        {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
        {"norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 24},
    ),
    {"attention_bias": 1, "mlp_bias": "x", "norm_eps": "x", "partial_rotary_factor": 0.2},
    {"ReLU": fault("mlp.act", activation="relu")},
    sizes=size_switches(4, 1, hidden_size=96, num_hidden_layers=3),
    gguf=GgufCase(
        "nemotron",
        lambda raw: {
            "attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 8,
            "rope.scaling.type": "none",
        },
        tensors=lambda raw, tensors: {
            name: each + 1 if name.endswith("norm.weight") else each
            for name, each in tensors.items()
        },
        changes={"attention_bias": True},
    ),
)  # fmt: skip
