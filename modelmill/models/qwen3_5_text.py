"""Qwen3.5, text (``Qwen3_5ForCausalLM``): Qwen3-Next with an MLP in the place of the experts."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _delta_net_config
from modelmill.models._delta_net_config import (
    GATED_ATTENTION_ALLOWED_VALUES,
    QWEN35_INEFFECTIVE_KEYS,
)
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _delta_net_config.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = QWEN35_INEFFECTIVE_KEYS
SUPPORTED_VALUES = GATED_ATTENTION_ALLOWED_VALUES


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Qwen3_5TextConfig."""
    return _delta_net_config.config_from_hf(_delta_net_config.without_mrope_keys(raw), kv_heads=4)
