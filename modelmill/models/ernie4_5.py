"""ERNIE 4.5, dense: LLaMA with neighbouring channels rotated, one bias switch for all matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import activation, linear_bias_fields
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.models._llama_common import CHECKPOINT_NAMES, CHECKPOINT_PREFIXES
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["CHECKPOINT_PREFIXES", "Model", "config_from_hf", "ignored_tensors", "rules"]

LAYOUT = CheckpointLayout(CHECKPOINT_NAMES, neighbours=True)
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Ernie4_5Config."""
    raw = overlay_config(raw, {"num_key_value_heads": 2, "head_dim": 128})
    return _llama_common.config_from_hf(
        raw,
        positions=131072,
        eps=1e-5,
        tied=True,
        theta=500000.0,
        activation=activation(raw, "hidden_act", "silu"),
        **linear_bias_fields(raw, "use_bias", False),
    )


class Model(Decoder):
    """The plain decoder."""
