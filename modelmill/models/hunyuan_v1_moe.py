"""Hunyuan with experts (Hunyuan-A13B): the dense one, with experts and one that all tokens have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _hunyuan_config
from modelmill.models._hf_config import num_layers, positive_int, require_supported_value
from modelmill.models._hunyuan_config import HUNYUAN_NAMES
from modelmill.models._moe_config import (
    EXPERT_NAMES,
    MAX_EXPERTS,
    NUM_EXPERTS_KEYS,
    SHARED_EXPERT_PATH,
    moe_spec_with_shared_experts,
)
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

SUPPORTED_VALUES = {
    **_hunyuan_config.SUPPORTED_VALUES, "use_mixed_mlp_moe": (True,), "norm_topk_prob": (True,),
    "moe_drop_tokens": (False,), "moe_layer_num_skipped": (0,), "group_limited_greedy": (False,),
    "moe_random_routing_dropped_token": (False,), "routed_scaling_factor": (False, 1.0),
    "use_mla": (False,),
}  # fmt: skip
SHARED_MLP_NAMES = {
    f"{SHARED_EXPERT_PATH}.gate_up_proj": ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    f"{SHARED_EXPERT_PATH}.down_proj": ("mlp.shared_mlp.down_proj",),
}
Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**HUNYUAN_NAMES, **EXPERT_NAMES, **SHARED_MLP_NAMES, "mlp.router": ("mlp.gate.wg",)}
)
# of images, which these models do not read
UNUSED_CONFIG_KEYS = (
    *_hunyuan_config.UNUSED_CONFIG_KEYS, "num_media_embeds", "vit_input_resolution",
)  # fmt: skip
TOP_K_KEYS = ("moe_topk", "num_experts_per_tok")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in HunYuanMoEV1Config."""
    config, layers = _hunyuan_config.config_from_hf(raw), num_layers(raw, "num_hidden_layers")
    keys = (*TOP_K_KEYS, "moe_intermediate_size", "num_shared_expert")
    flat = with_config_overrides(raw, {key: _uniform_layer_value(raw, key, layers) for key in keys})
    require_supported_value(flat, "moe_intermediate_size", (config.inner, None), None)
    require_supported_value(flat, "num_shared_expert", (1, None), None)
    experts = positive_int(raw, *NUM_EXPERTS_KEYS, default=1, max_value=MAX_EXPERTS)
    router = RouterConfig(experts, positive_int(flat, *TOP_K_KEYS, default=1, max_value=experts))
    return replace(config, moe=moe_spec_with_shared_experts(config, router, config.inner, 1))


def _uniform_layer_value(raw: RawConfig, key: str, layers: int) -> Any:
    """A number, or what a list says of each layer.

    Raises:
        CheckpointError: for a list of several numbers, or of another length.
    """
    value = raw.get(key)
    if not isinstance(value, list):
        return value
    if len(value) != layers or any(each != value[0] for each in value):
        raise CheckpointError(
            f"config.json: {key}={quote(value, 60)} must be {layers} times the same number"
        )
    return value[0]
