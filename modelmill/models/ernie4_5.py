"""ERNIE 4.5, dense: LLaMA with neighbouring channels rotated, one bias switch for all matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.models import _llama_common
from modelmill.models._hf_config import linear_bias_fields
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

LAYOUT = CheckpointLayout(CHECKPOINT_NAMES, neighbours=True)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Ernie4_5Config."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(
            kv_heads=2,
            head_dim=128,
            positions=131072,
            eps=1e-5,
            tied=True,
            theta=500000.0,
            activation="silu",
        ),
        **linear_bias_fields(raw, "use_bias", False),
    )


Model = Decoder
