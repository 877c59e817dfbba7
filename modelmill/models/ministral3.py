"""Ministral 3: Mistral with YaRN, whose queries grow with the position as Llama 4's."""

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
from modelmill.models._hf_config import non_negative_float, positive_int
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.attention_temperature import AttentionTemperature
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT
SCALING_BETA_KEY, ORIGINAL_LENGTH_KEY = "llama_4_scaling_beta", "original_max_position_embeddings"
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, ORIGINAL_LENGTH_KEY: 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
    SCALING_BETA_KEY: 0.1,
}  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Ministral3Config."""
    raw = with_config_defaults(raw, {"num_key_value_heads": 8, "head_dim": 128})
    plain, growth = split_attention_temperature(raw, DEFAULT_ROPE)
    config = _llama_common.config_from_hf(
        plain, ConfigDefaults(positions=262144, eps=1e-5, activation="silu")
    )
    return _llama_common.with_sliding_window(raw, replace(config, attention_temperature=growth))


def split_attention_temperature(
    raw: RawConfig, default_rope: Mapping[str, Any], idle: tuple[str, ...] = ()
) -> tuple[RawConfig, AttentionTemperature]:
    """The config with the rotation alone, and by how much queries grow with the position.

    Args:
        raw: The config.
        default_rope: ``rope_parameters`` where it is silent.
        idle: Further keys there that the rotation does not read.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    stated = raw.get(key) or default_rope
    rope = dict(stated) if isinstance(stated, Mapping) else {}
    scales = rope.get("rope_type", rope.get("type")) in ("yarn", "llama3")
    outside = raw.get(ORIGINAL_LENGTH_KEY) if scales else None
    if outside is not None:  # goes before the one within, as in transformers
        rope[ORIGINAL_LENGTH_KEY] = outside
    slope, trained = (
        f"{key}.{SCALING_BETA_KEY}",
        ORIGINAL_LENGTH_KEY if outside is not None else f"{key}.{ORIGINAL_LENGTH_KEY}",
    )
    named = {slope: rope.get(SCALING_BETA_KEY), trained: rope.get(ORIGINAL_LENGTH_KEY)}
    growth = AttentionTemperature(non_negative_float(named, slope), positive_int(named, trained))
    unread = (SCALING_BETA_KEY, "max_position_embeddings", *idle)
    for each in (*unread, *(() if scales else (ORIGINAL_LENGTH_KEY,))):
        rope.pop(each, None)
    return with_config_overrides(raw, {key: rope}), growth
