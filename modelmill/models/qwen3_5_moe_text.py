"""Qwen3.5 with experts, text (``Qwen3_5MoeForCausalLM``): Qwen3-Next with other tensor names."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _delta_net_config
from modelmill.models._delta_net_config import (
    GATED_ATTENTION_ALLOWED_VALUES,
    QWEN35_DELTA_NET_NAMES,
    QWEN35_INEFFECTIVE_KEYS,
)
from modelmill.models._hf_config import positive_int
from modelmill.models._moe_config import (
    EXPERT_NAMES,
    GATED_SHARED_EXPERT_NAMES,
    softmax_router_config,
)
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
CHECKPOINT_LAYOUT = replace(
    _delta_net_config.CHECKPOINT_LAYOUT,
    names={**QWEN35_DELTA_NET_NAMES, **EXPERT_NAMES, **GATED_SHARED_EXPERT_NAMES},
)
UNUSED_CONFIG_KEYS = QWEN35_INEFFECTIVE_KEYS
SUPPORTED_VALUES = GATED_ATTENTION_ALLOWED_VALUES


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Qwen3_5MoeTextConfig."""
    inner, shared = (
        positive_int(raw, key, default=512)
        for key in ("moe_intermediate_size", "shared_expert_intermediate_size")
    )
    raw = with_config_overrides(
        _delta_net_config.without_mrope_keys(raw), {"intermediate_size": inner}
    )
    config = _delta_net_config.config_from_hf(raw, kv_heads=2)
    router = softmax_router_config(raw, experts=256, top_k=8, renormalize=True)
    expert, common = MLPSpec(config.hidden, inner), MLPSpec(config.hidden, shared)
    return replace(config, moe=MoESpec(router, expert, common, shared_gate=True))
