"""Qwen3: RMSNorm on each head of q and k before the rotation; head_dim independent of the hidden size."""

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
    """Sizes from config.json; attention biases by ``attention_bias``."""
    layers = depth(raw, "num_hidden_layers")
    bias = switch(raw, "attention_bias", False)
    windowed = switch(raw, "use_sliding_window", False)
    below = {"head_dim": 128, "num_key_value_heads": 32, "max_window_layers": 28}
    raw = layered(raw, below, {"use_sliding_window": windowed})
    return _llama_names.configure(
        raw,
        positions=32768,
        qkv_bias=bias,
        out_bias=bias,
        head_norm=True,
        windows=_llama_names.windows(raw, layers),
    )


class Model(Decoder):
    """The plain decoder with norms on q and k."""
