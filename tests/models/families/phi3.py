"""Phi-3, 3.5 and 4."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.models.family_cases import (
    LLAMA_FAULTS,
    REFUSED,
    ROTARY,
    SMALL,
    FamilyCase,
    GgufCase,
    fault,
    rms_facts,
    with_scaling,
)

SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.5, 1.8], [1.0, 1.5, 2.0, 3.0, 5.0, 8.0]
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def with_factors(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with LongRoPE's factors, which are no part of the model's."""
    del raw
    factors = {"long": LONG, "short": SHORT}
    return tensors | {f"rope_factors_{k}.weight": torch.tensor(v) for k, v in factors.items()}


CASE = FamilyCase(
    "phi3",
    {**SMALL, "rope_scaling": LONGROPE, "original_max_position_embeddings": 128},
    (
        {"num_key_value_heads": 4}, {"num_key_value_heads": None}, {"num_hidden_layers": 3},
        {"intermediate_size": 72}, {"vocab_size": 96},
        {"rope_scaling": None}, {"rope_scaling": None, "rope_theta": 300.0},
        {"rope_scaling": None, "rope_parameters": LONGROPE | {"rope_theta": 300.0}},
        {"rope_scaling": LONGROPE | {"type": "su", "original_max_position_embeddings": 128}},
        {"max_position_embeddings": 128}, {"max_position_embeddings": 512},
        {"original_max_position_embeddings": 64, "max_position_embeddings": 2048},
        {"rope_scaling": LONGROPE | {"attention_factor": 1.3}},
        {"rope_scaling": LONGROPE | {"factor": 32.0}},
        {"hidden_size": 64, "partial_rotary_factor": 0.75},
        {"hidden_size": 64, "partial_rotary_factor": 0.5, "rope_scaling": None},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"sliding_window": 9},
    ),
    {**REFUSED, "rope_scaling": LONGROPE | {"long_factor": LONG[:5]},
     "partial_rotary_factor": 3.0, "sliding_window": -1},
    {
        **LLAMA_FAULTS,
        "long factors for short": fault(ROTARY, rope=with_scaling(short_factor=LONG)),
        "no temperature": fault(ROTARY, rope=with_scaling(attention_factor=1.0)),
    },
    gguf=GgufCase(
        "phi3",
        lambda raw: {
            **rms_facts(raw), "rope.dimension_count": 12, "attention.sliding_window": 0,
            "rope.scaling.original_context_length": 1024,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(2048 / 1024) / math.log(1024)),
        },
        tensors=with_factors,
        # longer than llama.cpp's default context, by which it chooses a list
        changes={"original_max_position_embeddings": 1024, "max_position_embeddings": 2048},
    ),
)  # fmt: skip
