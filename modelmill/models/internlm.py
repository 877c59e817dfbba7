"""InternLM (1): LLaMA with biases in the attention, and a config of its own for the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, positive_float
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; ``rotary`` has the rotation's base, type and factor."""
    rotary = raw.get("rotary")
    if rotary is not None:
        raw = with_config_overrides(raw, {"rope_scaling": _rope_scaling(rotary)})
    return _llama_common.config_from_hf(raw, **attention_bias_fields(raw, "bias", True))


def _rope_scaling(rotary: Any) -> dict[str, Any]:
    """``rope_scaling`` of a ``rotary``."""
    if not isinstance(rotary, Mapping) or rotary.keys() - {"base", "type", "scaling_factor"}:
        raise CheckpointError(
            "config.json: rotary must be an object with base, type and scaling_factor, not "
            f"{quote(rotary, 60)}"
        )
    kinds = {"origin": "default", "dynamic": "dynamic"}
    if rotary.get("type", "origin") not in kinds:
        raise CheckpointError(
            f"config.json: rotary.type={quote(rotary['type'], 60)} is not supported (supported: "
            f"{', '.join(kinds)})"
        )
    scaling = {
        "rope_type": kinds[rotary.get("type", "origin")],
        "rope_theta": positive_float(rotary, "base", default=10000.0),
    }
    if scaling["rope_type"] == "dynamic":
        scaling["factor"] = positive_float(rotary, "scaling_factor", default=1.0)
    return scaling
