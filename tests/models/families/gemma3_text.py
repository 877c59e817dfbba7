"""Gemma 3, text."""

from __future__ import annotations

from tests.models.family_cases import (
    ROTARY,
    SMALL,
    FamilyCase,
    GgufCase,
    based,
    fault,
    gemma_facts,
    norms_plus_one,
    size_switches,
    times,
)

LINEAR = {"rope_type": "linear", "factor": 4.0}

CASE = FamilyCase(
    "gemma3_text",
    {**SMALL, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 20,
     "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    (
        *size_switches(4, 1), {"head_dim": 12}, {"sliding_window": 5},
        {"sliding_window_pattern": None}, {"sliding_window": None},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"rope_parameters": {"full_attention": LINEAR | {"rope_theta": 300.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}},
        {"rope_theta": 300.0, "rope_local_base_freq": 200.0},
        {"query_pre_attn_scalar": None}, {"final_logit_softcapping": 3.0},
        {"attention_bias": True}, {"hidden_activation": "silu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": False},
    ),
    {"is_encoder_decoder": True, "hidden_activation": "quick_gelu", "layer_types": ["mamba"],
     "attn_logit_softcapping": 30.0, "use_bidirectional_attention": True, "sliding_window": 0,
     "final_logit_softcapping": -1, "query_pre_attn_scalar": 0, "attention_bias": 1,
     "rope_parameters": {"rope_type": "default"}},
    {
        "RoPE base x 2": fault(ROTARY, 1, rope=based(2.0)),
        "RoPE base of windows x 2": fault(ROTARY, local_rope=based(2.0)),
        "embeddings x 1.05": fault("embed", None, embedding_scale=times(1.05)),
        "scores x 1.5": fault("attn.core", attention_scale=times(1.5)),
        "no cap": fault("head", None, case={"final_logit_softcapping": 3.0}, logit_softcap=None),
        "a longer window": fault("attn.core", windows=(30, None, 30)),
        "window + 1": fault("attn.core", windows=(21, None, 21)),
        "window - 1": fault("attn.core", windows=(19, None, 19)),
    },
    gguf=GgufCase(
        "gemma3",
        lambda raw: gemma_facts(raw) | {
            "attention.sliding_window": raw["sliding_window"], "rope.freq_base": 1e6,
            "rope.scaling.factor": 4.0, "rope.scaling.type": "linear",
            "attention.sliding_window_pattern": 2,
        },
        changes={"query_pre_attn_scalar": 16, "rope_scaling": LINEAR},
        tensors=norms_plus_one,
    ),
)  # fmt: skip
