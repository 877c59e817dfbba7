"""Hunyuan, dense: LLaMA whose queries and keys are rotated, then normed."""

from __future__ import annotations

from modelmill.models._hunyuan_config import (
    NAMES,
    SUPPORTED_VALUES,
    UNUSED_CONFIG_KEYS,
    config_from_hf,
)
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.models._llama_common import CHECKPOINT_PREFIXES
from modelmill.nn.decoder import Decoder

__all__ = [
    "CHECKPOINT_PREFIXES", "SUPPORTED_VALUES", "UNUSED_CONFIG_KEYS", "Model", "config_from_hf",
    "ignored_tensors", "rules",
]  # fmt: skip

LAYOUT = CheckpointLayout(NAMES)
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors


class Model(Decoder):
    """The decoder that norms rotated queries and keys."""
