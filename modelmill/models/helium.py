"""Helium: LLaMA with neighbouring channels rotated, and no bias of the output projection."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import read_boolean
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(CHECKPOINT_NAMES, neighbours=True)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in HeliumConfig."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(
            kv_heads=20, head_dim=128, positions=4096, eps=1e-8, theta=100000.0, activation="silu"
        ),
        qkv_bias=read_boolean(raw, "attention_bias", False),
        mlp_bias=read_boolean(raw, "mlp_bias", False),
    )
