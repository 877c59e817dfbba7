"""Code World Model."""

from __future__ import annotations

from tests.models.family_cases import GQA_SIZES, LLAMA3, decoder_family, fault

CASE = decoder_family(
    "cwm",
    {"num_hidden_layers": 3, "head_dim": 12, "sliding_window": 20, "rope_parameters": LLAMA3},
    (
        {"rope_parameters": None}, {"rope_parameters": {}}, {"sliding_window": 5},
        {"mlp_bias": True},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"num_hidden_layers": 5}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16}, {"hidden_act": "gelu"},
    ),
    {"layer_types": ["mamba"], "sliding_window": 0, "head_dim": 7, "mlp_bias": 1,
     "attention_bias": True},
    {
        "windows in all layers": fault("attn.core", windows=(20, 20, 20)),
        "a longer window": fault("attn.core", 1, windows=(None, 30, 20)),
    },
    sizes=(*GQA_SIZES, {"num_hidden_layers": 2}),
    ropes=(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rope_parameters": None, "rope_theta": 500.0,
         "rope_scaling": {"type": "linear", "factor": 3.0}},
    ),
)  # fmt: skip
