"""Qwen1.5-MoE and Qwen2-MoE: many small experts beside a gated one that every token has."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    non_negative_float,
    num_layers,
    positive_int,
    read_activation,
    read_boolean,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._moe_config import (
    EXPERT_NAMES,
    GATED_SHARED_EXPERT_NAMES,
    dense_layers,
    norm_topk_router,
)
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
DEFAULT_INTERMEDIATE_SIZES = {
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, **EXPERT_NAMES, **GATED_SHARED_EXPERT_NAMES}
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Qwen2MoeConfig."""
    layers, act = num_layers(raw, "num_hidden_layers"), read_activation(raw, "hidden_act", "silu")
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=16, positions=32768),
        qkv_bias=read_boolean(raw, "qkv_bias", True),
        activation=act,
        windows=_windows(raw, layers),
    )
    router = norm_topk_router(raw, experts=60, top_k=4, renormalize=False)
    expert, shared = (
        MLPSpec(config.hidden, positive_int(raw, key, default=size), activation=act)
        for key, size in DEFAULT_INTERMEDIATE_SIZES.items()
    )
    moe = MoESpec(router, expert, shared, shared_gate=True)
    return replace(config, moe=moe, dense_layers=dense_layers(raw, layers))


def _windows(raw: RawConfig, layers: int) -> tuple[int | None, ...]:
    """The windows: without ``layer_types``, of every second layer below ``max_window_layers``."""
    windowed = read_boolean(raw, "use_sliding_window", False)
    first = non_negative_float(raw, "max_window_layers", default=28)
    types = raw.get("layer_types") or [
        _llama_common.SLIDING_ATTENTION
        if windowed and layer % 2 == 0 and layer < first
        else _llama_common.FULL_ATTENTION
        for layer in range(layers)
    ]
    switches = {"use_sliding_window": windowed, "layer_types": types}
    return _llama_common.sliding_windows(with_config_overrides(raw, switches), layers)
