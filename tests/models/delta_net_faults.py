"""Families with Gated DeltaNet have in common: switches, refused values, planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.models.family_cases import (
    EPS_FAULT,
    ROTARY,
    FamilyCase,
    PlantedFault,
    based,
    changed,
    fault,
)

LAYER_TYPES = ["full_attention", "linear_attention"]
DELTA_NET: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 12, "linear_value_head_dim": 8, "full_attention_interval": 2,
}  # fmt: skip
# how the positions of images are divided, which text does not see
MROPE_SWITCH: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5,
                        "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
DELTA_NET_SWITCHES: tuple[dict[str, Any], ...] = (
    {"linear_num_key_heads": 1},
    {"linear_num_value_heads": 2},
    {"linear_key_head_dim": 8},
    {"linear_value_head_dim": 16},
    {"linear_conv_kernel_dim": 3},
    {"full_attention_interval": None, "layer_types": LAYER_TYPES},
    {"full_attention_interval": 3, "num_hidden_layers": 4},
    {"head_dim": 24},
    {"attention_bias": True},
    {"rms_norm_eps": 1e-3},
    {"tie_word_embeddings": True},
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0,
                         "partial_rotary_factor": 0.25}},
)  # fmt: skip
DELTA_NET_REFUSED: dict[str, Any] = {
    "linear_num_value_heads": 3,
    "linear_num_key_heads": 0,
    "linear_key_head_dim": 4096,
    "linear_value_head_dim": -1,
    "linear_conv_kernel_dim": 1,
    "layer_types": ["full_attention", "sliding_attention"],
    "full_attention_interval": 0,
    "attention_bias": "yes",
    "partial_rotary_factor": 0.2,
}


DELTA_NET_FAULTS: dict[str, PlantedFault] = {
    "RoPE base x 2": fault(ROTARY, 1, rope=based(2.0)),
    "eps x 10": EPS_FAULT,
    "gated norm's eps x 1000": fault("attn.gated_norm", recurrence=changed(eps=1e-3)),
}


def with_delta_net(case: FamilyCase) -> FamilyCase:
    """A family of decoders, some of whose layers are Gated DeltaNet."""
    return replace(
        case,
        base={**case.base, **DELTA_NET},
        switches=(*case.switches, *DELTA_NET_SWITCHES),
        refused={**case.refused, **DELTA_NET_REFUSED, "hidden_act": "gelu"},
        faults={**case.faults, **DELTA_NET_FAULTS},
    )
