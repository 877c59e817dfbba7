"""VaultGemma."""

from __future__ import annotations

from tests.models.family_cases import (
    NULL,
    ROPE_FAULT,
    ROPES,
    SMALL,
    FamilyCase,
    fault,
    size_switches,
    times,
)

CASE = FamilyCase(
    "vaultgemma",
    {**SMALL, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 3,
     "sliding_window": 20,
     "query_pre_attn_scalar": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    (
        *ROPES, {"rope_theta": 300.0},
        *size_switches(4, 1), {"head_dim": 12}, {"sliding_window": 5},
        {"sliding_window": None}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": False},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"query_pre_attn_scalar": None}, {"attention_bias": True}, {"hidden_activation": "silu"},
        {"attn_logit_softcapping": 1.5},
        {"attn_logit_softcapping": None, "query_pre_attn_scalar": 16},
        {"attn_logit_softcapping": NULL, "final_logit_softcapping": NULL,
         "query_pre_attn_scalar": 16},
        {"final_logit_softcapping": 9.0}, {"final_logit_softcapping": None},
    ),
    {"is_encoder_decoder": True, "hidden_activation": "quick_gelu", "layer_types": ["mamba"],
     "attn_logit_softcapping": 0,  "sliding_window": 0,
     "final_logit_softcapping": -1, "query_pre_attn_scalar": 0, "attention_bias": 1},
    {
        "RoPE base x 2": ROPE_FAULT,
        "eps x 10": fault("attn_norm.eps", eps=times(10)),
        "no cap of scores": fault("attn.core", attention_softcap=None),
        "a cap of scores x 1.2": fault("attn.core", attention_softcap=times(1.2)),
        "no cap of logits": fault("head", None, logit_softcap=None),
        "window + 1": fault("attn.core", windows=(21, None, 21)),
        "window - 1": fault("attn.core", windows=(19, None, 19)),
        "windows in the other layers": fault("attn.core", windows=(None, 20, None)),
        "scores x 1.5": fault("attn.core", attention_scale=times(1.5)),
        "embeddings x 1.05": fault("embed", None, embedding_scale=times(1.05)),
    },
)  # fmt: skip
