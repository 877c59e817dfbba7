"""Granite 3."""

from __future__ import annotations

from tests.models.family_cases import GgufCase, decoder_family, fault, rms_facts, times

CASE = decoder_family(
    "granite",
    {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
     "logits_scaling": 4.0},
    (
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
        {"embedding_multiplier": None, "attention_multiplier": None, "residual_multiplier": None,
         "logits_scaling": None},
    ),
    {"residual_multiplier": "0.5", "logits_scaling": 0.0,
     "attention_bias": 1, "embedding_multiplier": -1.0, "attention_multiplier": "x"},
    {
        "no factor on scores": fault("attn.core", attention_scale=None),
        "branches x 1.05": fault("attn_post", branch_scale=times(1.05)),
        "embeddings x 1.05": fault("embed", None, embedding_scale=times(1.05)),
        "logits x 1.05": fault("head", None, logit_scale=times(1.05)),
    },
    gguf=GgufCase(
        "granite",
        lambda raw: {
            **rms_facts(raw), "attention.scale": raw["attention_multiplier"],
            "embedding_scale": raw["embedding_multiplier"],
            "residual_scale": raw["residual_multiplier"], "logit_scale": raw["logits_scaling"],
        },
        permuted=True,
        changes={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
