"""Code World Model (``CwmForCausalLM``): LLaMA 3 with windows in three of four layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelmill.core.read_tracking_config import (
    RawConfig,
    with_config_defaults,
    with_config_overrides,
)
from modelmill.models import _llama_common
from modelmill.models._hf_config import positive_int, read_boolean
from modelmill.models._llama_common import ConfigDefaults, windows_with_full_first_of_every_n
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT
SUPPORTED_VALUES = {"attention_bias": (False,)}
FULL_ATTENTION_INTERVAL = 4
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
CONFIG_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192}


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in CwmConfig."""
    raw = with_config_defaults(raw, CONFIG_DEFAULTS)
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw = with_config_overrides(raw, {"rope_parameters": DEFAULT_ROPE})
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=131072, eps=1e-5, theta=1000000.0, activation="silu"),
        mlp_bias=read_boolean(raw, "mlp_bias", False),
    )
    positive_int(raw, "sliding_window")  # the class has no null
    return replace(
        config,
        windows=windows_with_full_first_of_every_n(FULL_ATTENTION_INTERVAL, raw, config.layers),
    )
