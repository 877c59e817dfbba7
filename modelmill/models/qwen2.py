"""Qwen1.5, Qwen2 and Qwen2.5: bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import layered
from modelmill.models import _llama_names
from modelmill.models._llama_names import PREFIXES, drops, rules
from modelmill.models._raw import depth, switch
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["PREFIXES", "Model", "configure", "drops", "rules"]


def configure(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; windows only where ``use_sliding_window`` is true (its default is false)."""
    layers = depth(raw, "num_hidden_layers")
    windowed = switch(raw, "use_sliding_window", False)
    raw = layered(raw, {"num_key_value_heads": 32, "max_window_layers": 28}, {"use_sliding_window": windowed})
    return _llama_names.configure(raw, positions=32768, qkv_bias=True, windows=_llama_names.windows(raw, layers))


class Model(Decoder):
    """The plain decoder with qkv biases."""
