"""dots.llm1: Qwen3's attention, and DeepSeek-V3's experts (arXiv:2506.05767)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelmill.core.config_view import overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import activation, attention_bias, num_layers, positive_int
from modelmill.models._moe_config import (
    SELECTION_BIASES,
    SHARED_EXPERTS_LAYOUT,
    group_limited_router,
    leading_dense_layers,
    moe_spec_with_shared_experts,
)
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

SUPPORTED_VALUES = {
    "scoring_func": ("noaux_tc", "sigmoid"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
}  # fmt: skip
LAYOUT = SHARED_EXPERTS_LAYOUT
FLOAT32_TENSORS = SELECTION_BIASES


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Dots1Config."""
    act, layers = activation(raw, "hidden_act", "silu"), num_layers(raw, "num_hidden_layers")
    raw = overlay_config(
        raw, {"num_key_value_heads": 32, "max_window_layers": 62}, {"use_sliding_window": True}
    )
    config = _llama_common.config_from_hf(
        raw,
        activation=act,
        **attention_bias(raw),
        qk_norm=True,
        windows=_llama_common.sliding_windows(raw, layers),
    )
    inner = positive_int(raw, "moe_intermediate_size", default=1408)
    shared = positive_int(raw, "n_shared_experts", max_value=64)
    defaults = RouterConfig(
        positive_int(raw, "n_routed_experts"),
        positive_int(raw, "num_experts_per_tok"),
        renormalize=False,
    )
    moe = moe_spec_with_shared_experts(config, group_limited_router(raw, defaults), inner, shared)
    return replace(config, moe=moe, dense_layers=leading_dense_layers(raw, layers, 0))


Model = Decoder
