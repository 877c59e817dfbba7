"""SmolLM3: LLaMA without rotation in every fourth layer, where windows are, if there are any."""

from __future__ import annotations

from modelmill.core.errors import CheckpointError
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_and_mlp_bias_fields,
    num_layers,
    positive_int,
    read_boolean,
)
from modelmill.models._llama_common import (
    SLIDING_ATTENTION,
    ConfigDefaults,
    layer_types,
    refuse_sliding_layer_types,
)
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = ("max_window_layers",)  # layer_types names the windows


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in SmolLM3Config."""
    layers = num_layers(raw, "num_hidden_layers")
    unrotated = _unrotated_layers(raw, layers)
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=4, positions=32768, tied=True, theta=2000000.0, activation="silu"),
        **attention_and_mlp_bias_fields(raw),
        unrotated_layers=unrotated,
        windows=_windows(raw, layers, unrotated),
    )


def _unrotated_layers(raw: RawConfig, layers: int) -> frozenset[int]:
    """The layers that ``no_rope_layers`` marks by 0; without it every n-th one."""
    interval = positive_int(raw, "no_rope_layer_interval", default=4)
    marks = raw.get("no_rope_layers")
    if marks is None:
        return frozenset(range(interval - 1, layers, interval))
    if not isinstance(marks, list) or len(marks) < layers or any(m not in (0, 1) for m in marks):
        raise CheckpointError(
            f"config.json: no_rope_layers must be a list of 0 or 1 for each of {layers} layers"
        )
    return frozenset(i for i in range(layers) if not marks[i])


def _windows(raw: RawConfig, layers: int, unrotated: frozenset[int]) -> tuple[int | None, ...]:
    """The windows of layers named in ``layer_types``; without it those that are not rotated."""
    types, size = layer_types(raw, layers), raw.get("sliding_window")
    if not read_boolean(raw, "use_sliding_window", False) or size is None:
        refuse_sliding_layer_types(types)
        return ()
    size = positive_int(raw, "sliding_window")
    if types is None:
        return tuple(size if i in unrotated else None for i in range(layers))
    return tuple(size if each == SLIDING_ATTENTION else None for each in types)
