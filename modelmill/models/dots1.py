"""dots.llm1: Qwen3's attention, and DeepSeek-V3's experts (arXiv:2506.05767)."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common, _moe_config
from modelmill.models._hf_config import (
    attention_bias_fields,
    num_layers,
    positive_int,
    read_activation,
    read_boolean,
)
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

Model = Decoder
SUPPORTED_VALUES = {
    "scoring_func": ("noaux_tc", "sigmoid"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
}  # fmt: skip
CHECKPOINT_LAYOUT = _moe_config.SHARED_EXPERTS_LAYOUT
FLOAT32_TENSORS = _moe_config.SELECTION_BIAS_PATTERNS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Dots1Config."""
    act, layers = read_activation(raw, "hidden_act", "silu"), num_layers(raw, "num_hidden_layers")
    if raw.get("sliding_window") is None:
        read_boolean(raw, "use_sliding_window", False)  # there are no windows, whatever it says
    raw = with_config_defaults(
        raw,
        {"num_key_value_heads": 32, "max_window_layers": 62},
        overrides={"use_sliding_window": True},
    )
    config = _llama_common.config_from_hf(
        raw,
        activation=act,
        **attention_bias_fields(raw),
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
    moe = _moe_config.moe_spec_with_shared_experts(
        config, _moe_config.group_limited_router(raw, defaults), inner, shared
    )
    return replace(
        config, moe=moe, dense_layers=_moe_config.leading_dense_layer_indices(raw, layers, 0)
    )
