"""OLMo 3."""

from __future__ import annotations

from tests.models.family_cases import (
    ROTARY,
    GgufCase,
    base_of,
    based,
    decoder_family,
    fault,
    rms_facts,
    times,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASE = decoder_family(
    "olmo3",
    {"num_hidden_layers": 4, "sliding_window": 20},
    (
        {"num_key_value_heads": None}, {"rope_theta": 300.0}, {"rope_scaling": YARN},
        {"rope_parameters": {"full_attention": YARN | {"rope_theta": 300.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}},
        {"sliding_window": 5}, {"sliding_window": None},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention",
                         "full_attention"]},
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"layer_types": ["mamba"], "sliding_window": 0, "attention_bias": 1,
     "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {
        "RoPE base x 2": fault(ROTARY, 3, rope=based(2.0)),
        "eps x 10": fault("attn_post.eps", eps=times(10)),
        "RoPE base of windows x 2": fault(ROTARY, local_rope=based(2.0)),
        "one rotation for all": fault(
            ROTARY, 3, case={"rope_theta": 300.0}, rope=base_of(500000.0)
        ),
        "a longer window": fault("attn.core", windows=(30, 30, 30, None)),
    },
    ropes=(),
    gguf=GgufCase(
        "olmo2",
        lambda raw: {
            **rms_facts(raw), "rope.freq_base": 300.0, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [True, True, False, True],
        },
        changes={
            "rms_norm_eps": 1e-5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
                            "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
)  # fmt: skip
