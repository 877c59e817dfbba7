"""StableLM 2 and 3B."""

from __future__ import annotations

from tests.models.family_cases import (
    QK_NORM,
    GgufCase,
    decoder_family,
    fault,
    size_switches,
    with_eps,
)

CASE = decoder_family(
    "stablelm",
    {"hidden_size": 64},
    (
        {"use_qkv_bias": True}, {"qk_layernorm": True}, {"use_parallel_residual": True},
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
        {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40},
        {"hidden_act": "gelu"}, {"hidden_dropout": 0.5}, {"layer_norm_eps": 1e-3},
        {"tie_word_embeddings": True},
    ),
    {"partial_rotary_factor": 0.2, "use_parallel_residual": "yes", "qk_layernorm": 1,
     "use_qkv_bias": 0, "layer_norm_eps": "x"},
    {
        "norms of heads, eps x 100": fault(
            QK_NORM, case={"qk_layernorm": True}, qkv_norm=with_eps(100)
        ),
        "flat norms of heads": fault(QK_NORM, case={"qk_layernorm": True}, qkv_norm=with_eps(1e6)),
    },
    sizes=size_switches(4, 1, hidden_size=96, num_hidden_layers=3),
    gguf=GgufCase(
        "stablelm",
        lambda raw: {
            "attention.layer_norm_epsilon": 1e-5, "use_parallel_residual": False,
            "rope.dimension_count": raw["hidden_size"] // raw["num_attention_heads"] // 4,
        },
    ),
)  # fmt: skip
