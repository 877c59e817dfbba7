"""Ministral 3: Mistral with YaRN, whose queries grow with the position as Llama 4's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelmill.core.read_tracking_config import RawConfig, overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import non_negative_float, positive_int
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.attention_temperature import AttentionTemperature
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
LAYOUT = _llama_common.LAYOUT
SLOPE, TRAINED = "llama_4_scaling_beta", "original_max_position_embeddings"
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, TRAINED: 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, SLOPE: 0.1,
}  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Ministral3Config."""
    raw = overlay_config(raw, {"num_key_value_heads": 8, "head_dim": 128})
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    stated = raw.get(key) or DEFAULT_ROPE
    rope = dict(stated) if isinstance(stated, Mapping) else {}
    scales = rope.get("rope_type", rope.get("type")) in ("yarn", "llama3")
    outside = raw.get(TRAINED) if scales else None
    if outside is not None:  # goes before the one within, as in transformers
        rope[TRAINED] = outside
    slope, trained = f"{key}.{SLOPE}", TRAINED if outside is not None else f"{key}.{TRAINED}"
    named = {slope: rope.get(SLOPE), trained: rope.get(TRAINED)}
    growth = AttentionTemperature(non_negative_float(named, slope), positive_int(named, trained))
    # what the rotation itself does not read
    for idle in (SLOPE, "max_position_embeddings", *(() if scales else (TRAINED,))):
        rope.pop(idle, None)
    config = _llama_common.config_from_hf(
        overlay_config(raw, {}, {key: rope}),
        ConfigDefaults(positions=262144, eps=1e-5, activation="silu"),
    )
    return _llama_common.with_sliding_window(raw, replace(config, attention_temperature=growth))
