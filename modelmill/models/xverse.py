"""XVERSE, dense (7B, 13B, 65B): LLaMA under another name."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = ("max_tokenizer_truncation",)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in XverseConfig."""
    return _llama_common.config_from_hf(raw, ConfigDefaults(positions=8192))
