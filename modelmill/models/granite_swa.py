"""Granite with windows (``GraniteSWAForCausalLM``): sinks, and layers that do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelmill.core.config_view import RawConfig, overlay_config
from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.models import granite
from modelmill.models._hf_config import num_layers
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.models._llama_common import CHECKPOINT_NAMES, windows_but_every
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, "attn.core": ("self_attn",)})  # the sinks
UNUSED_CONFIG_KEYS = ("rope_theta",)  # where layer_rope_theta has another base
FULL_EVERY = 4
DEFAULTS = {
    "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "sliding_window": 128,
}  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GraniteSWAConfig."""
    raw = overlay_config(raw, DEFAULTS)
    layers = num_layers(raw, "num_hidden_layers")
    bases = _bases(raw, layers)
    base = next((each for each in bases or () if each), None)
    if base is not None:
        raw = _with_base(raw, base)
    return replace(
        granite.config_from_hf(raw),
        sinks=True,
        windows=windows_but_every(FULL_EVERY, raw, layers),
        unrotated_layers=frozenset(i for i, each in enumerate(bases or ()) if not each),
    )


def _bases(raw: RawConfig, layers: int) -> list[float] | None:
    """``layer_rope_theta``: a base for each layer that rotates, 0 for others; None: all rotate.

    Raises:
        CheckpointError: for several bases, or another number of layers.
    """
    bases = raw.get("layer_rope_theta")
    if bases is None:
        return None
    numbers = isinstance(bases, list) and all(type(each) in (int, float) for each in bases)
    if not numbers or len(bases) != layers or len({*bases} - {0}) > 1 or min(bases) < 0:
        raise CheckpointError(
            f"config.json: layer_rope_theta must have one base, or 0, for each of {layers} layers, "
            f"not {quote(bases, 60)}"
        )
    return list(bases)


def _with_base(raw: RawConfig, base: float) -> Mapping[str, Any]:
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    return overlay_config(raw, {}, {key: {**(raw.get(key) or {}), "rope_theta": base}})
