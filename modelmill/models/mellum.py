"""Mellum 2: Qwen3-MoE with windows in some layers, which have a rotation of their own."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, positive_int, require_supported_value
from modelmill.models._llama_common import CHECKPOINT_NAMES, SLIDING_ATTENTION, ConfigDefaults
from modelmill.models._moe_config import EXPERT_NAMES, dense_layers_by_mlp_type, norm_topk_router
from modelmill.models._rename_rules import IGNORED_BUFFERS, CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, **EXPERT_NAMES}, ignored=(*IGNORED_BUFFERS, r"mtp\..*")
)
SUPPORTED_VALUES = {"use_sliding_window": (True,)}
# of multi-token prediction, and of layers that layer_types names
UNUSED_CONFIG_KEYS = (
    "mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers", "num_nextn_predict_layers",
    "max_window_layers",
)  # fmt: skip
DEFAULT_ROPE_THETA, DEFAULT_WINDOW_ROPE_THETA = 500000.0, 10000.0
CONFIG_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024}


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in MellumConfig."""
    require_supported_value(
        raw, "rope_scaling", (None,), None
    )  # rope_parameters has one for each layer type
    _llama_common.require_layer_rope_thetas(raw.get("rope_parameters"))
    raw = with_config_defaults(
        raw, CONFIG_DEFAULTS, overrides={"rope_theta": None, "rope_scaling": None}
    )
    full, local = (
        _llama_common.config_from_hf(
            each,
            ConfigDefaults(positions=131072, activation="silu"),
            **attention_bias_fields(raw),
            qk_norm=True,
        )
        for each in _llama_common.full_and_local_rope_configs(
            raw, DEFAULT_ROPE_THETA, DEFAULT_WINDOW_ROPE_THETA
        )
    )
    router = norm_topk_router(raw, experts=64, top_k=8, renormalize=True)
    inner = positive_int(raw, "moe_intermediate_size", default=896)
    types = _llama_common.layer_types(raw, full.layers) or []
    size = None if raw["sliding_window"] is None else positive_int(raw, "sliding_window")
    if size is None:
        _llama_common.refuse_sliding_layer_types(types)
    return replace(
        full,
        windows=tuple(size if each == SLIDING_ATTENTION else None for each in types),
        local_rope=local.rope,
        moe=MoESpec(router, MLPSpec(full.hidden, inner, activation=full.activation)),
        dense_layers=dense_layers_by_mlp_type(raw, full.layers, dense=0),
    )
