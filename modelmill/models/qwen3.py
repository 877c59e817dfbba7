"""Qwen3: RMSNorm on each head of q and k before the rotation; head_dim is a size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias, boolean, num_layers
from modelmill.nn.decoder import Decoder, DecoderConfig

LAYOUT = _llama_common.LAYOUT


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; attention biases by ``attention_bias``."""
    layers = num_layers(raw, "num_hidden_layers")
    windowed = boolean(raw, "use_sliding_window", False)
    below = {"head_dim": 128, "num_key_value_heads": 32, "max_window_layers": 28}
    raw = overlay_config(raw, below, {"use_sliding_window": windowed})
    return _llama_common.config_from_hf(
        raw,
        positions=32768,
        **attention_bias(raw),
        qk_norm=True,
        windows=_llama_common.sliding_windows(raw, layers),
    )


Model = Decoder
