"""Solar Open: LLaMA's attention, and GLM-4.5's experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common, _moe_config
from modelmill.models._hf_config import positive_int, read_activation, read_boolean
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

Model = Decoder
UNUSED_CONFIG_KEYS = ("intermediate_size",)  # of layers without experts
SUPPORTED_VALUES = {
    "use_qk_norm": (False,), "first_k_dense_replace": (0,), "partial_rotary_factor": (1.0,),
}  # fmt: skip
CHECKPOINT_LAYOUT = _moe_config.SHARED_EXPERTS_LAYOUT
FLOAT32_TENSORS = _moe_config.SELECTION_BIAS_PATTERNS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in SolarOpenConfig."""
    act = read_activation(raw, "hidden_act", "silu")
    inner = positive_int(raw, "moe_intermediate_size", default=1280)
    config = _llama_common.config_from_hf(
        with_config_defaults(
            raw, {"num_key_value_heads": 8, "head_dim": 128}, overrides={"intermediate_size": inner}
        ),
        ConfigDefaults(positions=131072, eps=1e-5, theta=1000000.0),
        activation=act,
        qkv_bias=read_boolean(raw, "attention_bias", False),
    )
    shared = positive_int(raw, "n_shared_experts", default=1, max_value=64)
    router = _moe_config.group_limited_router(raw, RouterConfig(128, 8))
    return replace(
        config, moe=_moe_config.moe_spec_with_shared_experts(config, router, inner, shared)
    )
