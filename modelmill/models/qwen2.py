"""Qwen1.5, Qwen2 and Qwen2.5: bias on q, k and v."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import num_layers, read_boolean
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Qwen2Config."""
    defaults = ConfigDefaults(kv_heads=32, positions=32768, activation="silu")
    return _llama_common.config_from_hf(raw, defaults, qkv_bias=True, windows=layer_windows(raw))


def layer_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """Windows only with ``use_sliding_window``, whose default is false, as in Qwen3, too."""
    windowed = read_boolean(raw, "use_sliding_window", False)
    raw = with_config_defaults(
        raw, {"max_window_layers": 28}, overrides={"use_sliding_window": windowed}
    )
    return _llama_common.sliding_windows(raw, num_layers(raw, "num_hidden_layers"))
