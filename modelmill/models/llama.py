"""LLaMA and everything of its model_type: LLaMA 1–3, Vicuna, SmolLM2, TinyLlama and others."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_and_mlp_bias_fields
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; biases only where the config sets them."""
    config = _llama_common.config_from_hf(
        raw, ConfigDefaults(activation="silu"), **attention_and_mlp_bias_fields(raw)
    )
    return _llama_common.refuse_sliding_windows(raw, config)


UNUSED_CONFIG_KEYS = ("max_window_layers",)  # there are no windows
