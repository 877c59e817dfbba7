"""Seed-OSS: LLaMA with biases of q, k and v, and others by a switch each."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import read_boolean
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = ("residual_dropout",)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in SeedOssConfig."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=8, head_dim=128, positions=524288, activation="silu"),
        qkv_bias=read_boolean(raw, "attention_bias", True),
        out_bias=read_boolean(raw, "attention_out_bias", False),
        mlp_bias=read_boolean(raw, "mlp_bias", False),
    )
