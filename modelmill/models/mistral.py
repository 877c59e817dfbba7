"""Mistral: LLaMA's arithmetic with a sliding window over the keys where the config sets one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import layered
from modelmill.models import _llama_names
from modelmill.models._llama_names import PREFIXES, drops, rules
from modelmill.models._raw import depth
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["PREFIXES", "Model", "configure", "drops", "rules"]


def configure(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in MistralConfig."""
    layers = depth(raw, "num_hidden_layers")
    # MistralConfig knows neither use_sliding_window nor max_window_layers: the window holds in every layer. One with
    # layer_types is read as Ministral's, as transformers' AutoConfig does: only the layers named sliding have it
    raw = layered(raw, {"num_key_value_heads": 8}, {"use_sliding_window": True, "max_window_layers": 0})
    return _llama_names.configure(raw, positions=131072, windows=_llama_names.windows(raw, layers))


class Model(Decoder):
    """The plain decoder with windows."""
