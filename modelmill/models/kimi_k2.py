"""Kimi K2 (``DeepseekV3ForCausalLM``): DeepSeek-V3 with more experts and half the heads."""

from __future__ import annotations

from modelmill.models import deepseek_v3

Model = deepseek_v3.Model
CHECKPOINT_LAYOUT = deepseek_v3.CHECKPOINT_LAYOUT
FLOAT32_TENSORS = deepseek_v3.FLOAT32_TENSORS
SUPPORTED_VALUES = deepseek_v3.SUPPORTED_VALUES
UNUSED_CONFIG_KEYS = deepseek_v3.UNUSED_CONFIG_KEYS
config_from_hf = deepseek_v3.config_from_hf
