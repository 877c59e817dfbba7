"""Hunyuan, dense: LLaMA whose queries and keys are rotated, then normed."""

from __future__ import annotations

from modelmill.models import _hunyuan_config
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(_hunyuan_config.HUNYUAN_NAMES)
SUPPORTED_VALUES = _hunyuan_config.SUPPORTED_VALUES
UNUSED_CONFIG_KEYS = _hunyuan_config.UNUSED_CONFIG_KEYS
config_from_hf = _hunyuan_config.config_from_hf
