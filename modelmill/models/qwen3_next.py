"""Qwen3-Next: Gated DeltaNet, gated attention in every fourth layer, and experts."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _delta_net_config
from modelmill.models._delta_net_config import DELTA_NET_NAMES
from modelmill.models._hf_config import positive_int
from modelmill.models._moe_config import (
    EXPERT_NAMES,
    GATED_SHARED_EXPERT_NAMES,
    dense_layers,
    norm_topk_router,
)
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
CHECKPOINT_LAYOUT = replace(
    _delta_net_config.CHECKPOINT_LAYOUT,
    names={**DELTA_NET_NAMES, **EXPERT_NAMES, **GATED_SHARED_EXPERT_NAMES},
    grouped_state=True,
)
SUPPORTED_VALUES = {"use_sliding_window": (False,)}


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Qwen3NextConfig."""
    config = _delta_net_config.config_from_hf(raw, kv_heads=2)
    router = norm_topk_router(raw, experts=512, top_k=10, renormalize=True)
    expert, shared = (
        MLPSpec(config.hidden, positive_int(raw, key, default=512))
        for key in ("moe_intermediate_size", "shared_expert_intermediate_size")
    )
    moe = MoESpec(router, expert, shared, shared_gate=True)
    return replace(config, moe=moe, dense_layers=dense_layers(raw, config.layers))
