"""Qwen3.5, the language model."""

from __future__ import annotations

from tests.models.delta_net_faults import MROPE_SWITCH, with_delta_net
from tests.models.delta_net_gguf import with_gguf
from tests.models.family_cases import decoder_family

CASE = with_gguf(
    with_delta_net(decoder_family("qwen3_5_text", {}, (MROPE_SWITCH,), {}, {}, ropes=())), "qwen35"
)
