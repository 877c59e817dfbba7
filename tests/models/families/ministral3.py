"""Ministral 3."""

from __future__ import annotations

from typing import Any

from modelmill.nn.attention_temperature import AttentionTemperature
from tests.models.family_cases import LLAMA3, GgufCase, decoder_family, fault, rms_facts

YARN: dict[str, Any] = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
    "original_max_position_embeddings": 16, "max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip

CASE = decoder_family(
    "ministral3",
    {"head_dim": 12, "rope_parameters": YARN},
    (
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0}},
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 40, "mscale": 0.5}},
        {"rope_parameters": None, "rope_scaling": YARN},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0,
                             "llama_4_scaling_beta": 0.3,
                             "original_max_position_embeddings": 16}},
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16,
                             "llama_4_scaling_beta": 0.3}},
        {"original_max_position_embeddings": 20},
        {"sliding_window": 20}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16}, {"hidden_act": "relu"},
    ),
    {"hidden_act": "quick_gelu", "sliding_window": 0, "head_dim": 7,
     "rope_parameters": {"factor": 4.0}, "layer_types": ["sliding_attention", "full_attention"]},
    {
        "queries that do not grow": fault(
            ("attn.core", "attn.rope_cache.q"), attention_temperature=AttentionTemperature(0.0, 16)
        ),
        "another slope": fault(
            ("attn.core", "attn.rope_cache.q"), attention_temperature=AttentionTemperature(0.35, 16)
        ),
    },
    ropes=(),
    gguf=GgufCase(
        "mistral3",
        lambda raw: {
            **rms_facts(raw), "rope.freq_base": 1000.0, "rope.dimension_count": 12,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.3,
        },
        permuted=True,
        changes={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
