"""Kimi K2 (``DeepseekV3ForCausalLM``): DeepSeek-V3 with more experts and half the heads."""

from __future__ import annotations

from modelmill.models.deepseek_v3 import (
    FLOAT32_TENSORS,
    SUPPORTED_VALUES,
    UNUSED_CONFIG_KEYS,
    config_from_hf,
    ignored_tensors,
    rules,
)
from modelmill.nn.decoder import Decoder

__all__ = [
    "FLOAT32_TENSORS",
    "SUPPORTED_VALUES",
    "UNUSED_CONFIG_KEYS",
    "Model",
    "config_from_hf",
    "ignored_tensors",
    "rules",
]

CHECKPOINT_PREFIXES = ("model.",)


class Model(Decoder):
    """The decoder with latent attention and experts."""
