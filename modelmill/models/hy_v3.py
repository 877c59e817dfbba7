"""Hunyuan 3: norms of queries and keys, experts chosen by sigmoids and a learned bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_bias_fields,
    positive_float,
    positive_int,
    read_boolean,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._moe_config import (
    EXPERT_NAMES,
    SELECTION_BIAS_PATTERNS,
    dense_layers_by_mlp_type,
    moe_spec_with_shared_experts,
    softmax_router_config,
)
from modelmill.models._rename_rules import CheckpointLayout, SourceTensors
from modelmill.models.hunyuan_v1_moe import SHARED_MLP_NAMES
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import SIGMOID

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, **EXPERT_NAMES, **SHARED_MLP_NAMES, "mlp.router": ("mlp.router.gate",)},
    tensors={"mlp.routing.selection_bias": SourceTensors(("mlp.expert_bias",))},
    has_draft_layer=True,
)
FLOAT32_TENSORS = SELECTION_BIAS_PATTERNS
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "qk_norm": (True,), "route_norm": (True,), "moe_router_enable_expert_bias": (True,),
    "moe_router_use_sigmoid": (True,), "first_k_dense_replace": (1,),
}  # fmt: skip
UNUSED_CONFIG_KEYS = ("enable_moe_fp32_combine", "num_nextn_predict_layers")

CONFIG_DEFAULTS = ConfigDefaults(
    kv_heads=8, head_dim=128, positions=131072, eps=1e-5, theta=11_158_840.0, activation="silu"
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in HYV3Config."""
    config = _llama_common.config_from_hf(
        raw, CONFIG_DEFAULTS,
        **attention_bias_fields(raw), mlp_bias=read_boolean(raw, "mlp_bias", False), qk_norm=True,
    )  # fmt: skip
    router = replace(
        softmax_router_config(raw, experts=192, top_k=8, renormalize=True),
        scores=SIGMOID,
        scale=positive_float(raw, "router_scaling_factor", default=2.826),
        selection_bias=True,
    )
    inner = positive_int(raw, "moe_intermediate_size", "expert_hidden_dim", default=1536)
    shared = positive_int(raw, "num_shared_experts", default=1, max_value=64)
    moe = moe_spec_with_shared_experts(config, router, inner, shared, bias=config.mlp_bias)
    return replace(
        config, moe=moe, dense_layers=dense_layers_by_mlp_type(raw, config.layers, dense=1)
    )
