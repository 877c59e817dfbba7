"""Qwen3.5, the language model."""

from __future__ import annotations

from tests.models.delta_net_faults import (
    DELTA_NET,
    DELTA_NET_FAULTS,
    DELTA_NET_REFUSED,
    DELTA_NET_SWITCHES,
    MROPE_SWITCH,
)
from tests.models.family_cases import COMMON_SWITCHES, REFUSED, SMALL, FamilyCase

CASE = FamilyCase(
    "qwen3_5_text",
    {**SMALL, **DELTA_NET},
    (*COMMON_SWITCHES, *DELTA_NET_SWITCHES, MROPE_SWITCH),
    {**REFUSED, **DELTA_NET_REFUSED, "hidden_act": "gelu"},
    DELTA_NET_FAULTS,
)
