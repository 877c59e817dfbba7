"""Phi-1, 1.5 and 2."""

from __future__ import annotations

from tests.models.family_cases import (
    QK,
    QK_NORM,
    GgufCase,
    decoder_family,
    fault,
    size_switches,
    with_dim,
    with_eps,
)

FAULTS = {
    "half the rotated channels": fault(QK, rope=with_dim(4)),
    "eps of q and k x 100": fault(QK_NORM, case={"qk_layernorm": True}, qkv_norm=with_eps(100)),
}
CASE = decoder_family(
    "phi",
    {"hidden_size": 64},
    (
        {"qk_layernorm": True}, {"qk_layernorm": True, "partial_rotary_factor": 1.0},
        {"partial_rotary_factor": 0.25}, {"hidden_act": "gelu"}, {"layer_norm_eps": 1e-3},
        {"tie_word_embeddings": True},
    ),
    {"partial_rotary_factor": 0.05, "qk_layernorm": 1, "layer_norm_eps": -1},
    FAULTS,
    sizes=size_switches(4, None, hidden_size=96, num_hidden_layers=3),
    gguf=GgufCase(
        "phi2",
        lambda raw: {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 8},
    ),
)  # fmt: skip
