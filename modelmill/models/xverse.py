"""XVERSE, dense (7B, 13B, 65B): LLaMA under another name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.models import _llama_common
from modelmill.models._llama_common import CHECKPOINT_PREFIXES, ignored_tensors, rules
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["CHECKPOINT_PREFIXES", "Model", "config_from_hf", "ignored_tensors", "rules"]

UNUSED_CONFIG_KEYS = ("auto_map", "max_tokenizer_truncation")


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in XverseConfig."""
    return _llama_common.config_from_hf(raw, positions=8192)


class Model(Decoder):
    """The plain decoder."""
