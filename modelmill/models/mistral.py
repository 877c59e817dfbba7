"""Mistral: LLaMA's arithmetic with a sliding window over the keys where the config sets one."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import num_layers
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in MistralConfig."""
    layers = num_layers(raw, "num_hidden_layers")
    # MistralConfig knows neither use_sliding_window nor max_window_layers: the window holds in
    # every layer. One with layer_types is read as Ministral's, as transformers' AutoConfig does:
    # only the layers named sliding have it
    raw = with_config_defaults(
        raw,
        {"num_key_value_heads": 8},
        overrides={"use_sliding_window": True, "max_window_layers": 0},
    )
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=131072, activation="silu"),
        windows=_llama_common.sliding_windows(raw, layers),
    )
