"""Qwen3: RMSNorm on each head of q and k before the rotation; head_dim is a size of its own."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common, qwen2
from modelmill.models._hf_config import attention_bias_fields
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; attention biases by ``attention_bias``."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=32, head_dim=128, positions=32768, activation="silu"),
        **attention_bias_fields(raw),
        qk_norm=True,
        windows=qwen2.layer_windows(raw),
    )
