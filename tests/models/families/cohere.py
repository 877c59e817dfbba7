"""Command R and R+."""

from __future__ import annotations

from tests.models.family_cases import QK_NORM, GgufCase, decoder_family, fault, times, with_eps

CASE = decoder_family(
    "cohere",
    {"intermediate_size": 96},
    (
        {"num_key_value_heads": None}, {"use_qk_norm": True}, {"attention_bias": True},
        {"use_qk_norm": True, "num_key_value_heads": 1, "attention_bias": True},
        {"logit_scale": 0.5}, {"logit_scale": None}, {"head_dim": 16},
        {"hidden_act": "gelu"}, {"layer_norm_eps": 1e-3}, {"tie_word_embeddings": False},
    ),
    {"logit_scale": 0, "use_qk_norm": 1, "attention_bias": 1, "layer_norm_eps": "x"},
    {
        "logits x 1.05": fault("head", None, logit_scale=times(1.05)),
        "norms of heads, eps x 100": fault(
            QK_NORM, case={"use_qk_norm": True}, qkv_norm=with_eps(100)
        ),
    },
    gguf=GgufCase(
        "command-r",
        lambda raw: {
            "attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.0625,
            "rope.scaling.type": "none",
        },
        changes={"rope_theta": 300.0},
    ),
)  # fmt: skip
