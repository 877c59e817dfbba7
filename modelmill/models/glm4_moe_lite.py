"""GLM-4.7-Flash (``Glm4MoeLiteForCausalLM``): DeepSeek-V3's attention and experts."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _deepseek_common
from modelmill.models._deepseek_common import SIGMOID_ROUTER_ALLOWED_VALUES, decoder_config
from modelmill.models._hf_config import positive_int, read_boolean, require_supported_value
from modelmill.models._moe_config import (
    SELECTION_BIAS_PATTERNS,
    dense_layers_by_mlp_type,
    group_limited_router,
)
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

Model = Decoder
CHECKPOINT_LAYOUT = _deepseek_common.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = _deepseek_common.UNUSED_CONFIG_KEYS
SUPPORTED_VALUES = {**SIGMOID_ROUTER_ALLOWED_VALUES, "partial_rotary_factor": (1,)}
CONFIG_DEFAULTS = {
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DEFAULT_SIZES = {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
}
FLOAT32_TENSORS = SELECTION_BIAS_PATTERNS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Glm4MoeLiteConfig."""
    if raw.get("mlp_layer_types") is None:  # transformers reads no other key
        require_supported_value(raw, "first_k_dense_replace", (1, None), None)
    raw = with_config_defaults(raw, DEFAULT_SIZES, overrides={"first_k_dense_replace": 0})
    # in transformers a second name of qk_rope_head_dim
    turned = positive_int(raw, "qk_rope_head_dim", default=64)
    require_supported_value(raw, "head_dim", (turned, None), None)
    config = decoder_config(
        raw,
        group_limited_router(raw, RouterConfig(64, 4, scale=1.8)),
        positions=202752,
        neighbours=read_boolean(raw, "rope_interleave", True),
        defaults=CONFIG_DEFAULTS,
    )
    return replace(config, dense_layers=dense_layers_by_mlp_type(raw, config.layers, dense=1))
