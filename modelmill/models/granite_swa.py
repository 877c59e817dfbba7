"""Granite with windows (``GraniteSWAForCausalLM``): sinks, and layers that do not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import (
    RawConfig,
    with_config_defaults,
    with_config_overrides,
)
from modelmill.models import granite
from modelmill.models._hf_config import config_object, num_layers, read_per_layer_list
from modelmill.models._llama_common import CHECKPOINT_NAMES, windows_with_full_first_of_every_n
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, "attn.core": ("self_attn",)})  # the sinks
UNUSED_CONFIG_KEYS = ("rope_theta",)  # where layer_rope_theta has another base
FULL_ATTENTION_INTERVAL = 4
CONFIG_DEFAULTS = {
    "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "sliding_window": 128,
}  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GraniteSWAConfig."""
    raw, layers = (
        with_config_defaults(raw, CONFIG_DEFAULTS),
        num_layers(raw, "num_hidden_layers"),
    )
    windows = windows_with_full_first_of_every_n(FULL_ATTENTION_INTERVAL, raw, layers)
    # without the list all layers rotate
    bases = (
        read_per_layer_list(raw, "layer_rope_theta", layers, _is_rope_theta, "bases, or 0,") or []
    )
    slides = [window is not None for window in windows] or [False] * layers
    full = _common_rope_theta([base for base, each in zip(bases, slides) if not each])
    local = _common_rope_theta([base for base, each in zip(bases, slides) if each])
    differs = full is not None and local not in (None, full)
    return replace(
        granite.config_from_hf(_with_rope_theta(raw, full or local)),
        sinks=True,
        windows=windows,
        unrotated_layers=frozenset(i for i, each in enumerate(bases) if not each),
        local_rope=granite.config_from_hf(_with_rope_theta(raw, local)).rope if differs else None,
    )


def _is_rope_theta(value: Any) -> bool:
    """Whether a layer rotates by this base, or by none where it is 0."""
    return type(value) in (int, float) and value >= 0


def _common_rope_theta(bases: list[float]) -> float | None:
    """The base of the layers of one type that rotate; None where none is named.

    Raises:
        CheckpointError: for several bases.
    """
    own = {*bases} - {0}
    if len(own) > 1:
        raise CheckpointError(
            "config.json: layer_rope_theta must have one base for all layers with a window and one "
            f"for the others, not {quote(bases, 60)} for layers of one type"
        )
    return own.pop() if own else None


def _with_rope_theta(raw: RawConfig, base: float | None) -> RawConfig:
    """The config with another base; None: its own."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    own = {} if base is None else {key: {**config_object(key, raw.get(key)), "rope_theta": base}}
    return with_config_overrides(raw, own)
