"""Mistral: LLaMA's arithmetic with a sliding window over the keys where the config sets one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.models import _llama_names
from modelmill.models._llama_names import PREFIXES, drops, rules
from modelmill.models._raw import depth
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["PREFIXES", "Model", "configure", "drops", "rules"]


def configure(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json."""
    layers = depth(raw, "num_hidden_layers")
    # Mistral's config has no layer list: a window, where set, holds in every layer
    return _llama_names.configure(raw, windows=_llama_names.windows({**raw, "max_window_layers": 0}, layers))


class Model(Decoder):
    """The plain decoder with windows."""
