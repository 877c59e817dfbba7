"""Persimmon."""

from __future__ import annotations

from tests.models.families import phi
from tests.models.family_cases import QK, decoder_family, fault, size_switches, with_dim

CASE = decoder_family(
    "persimmon",
    {"hidden_size": 64, "num_key_value_heads": None},
    (
        {"qk_layernorm": False}, {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.25},
        {"hidden_act": "gelu"}, {"layer_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"num_attention_heads": 2}, {"head_dim": 16},
    ),
    {"partial_rotary_factor": 0.05, "qk_layernorm": 1, "layer_norm_eps": -1, "head_dim": 8},
    {
        **phi.FAULTS,
        # the order of rows follows the rotation, those of the norms' weights too
        "half the rotated channels": fault((*QK, "attn.qkv_norm"), rope=with_dim(4)),
        "ReLU": fault("mlp.act", activation="relu"),
    },
    sizes=size_switches(hidden_size=96, num_hidden_layers=3),
    unnamed_fields=frozenset({"hidden_dropout"}),
)  # fmt: skip
