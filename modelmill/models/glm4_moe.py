"""GLM-4.5 and 4.6: sigmoid router with groups, a shared expert, half of each head rotated.

arXiv:2508.06471. Layers of multi-token prediction in the file are not used.
"""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common, _moe_config
from modelmill.models._hf_config import positive_int, read_activation, read_boolean
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

Model = Decoder
CHECKPOINT_LAYOUT = replace(_moe_config.SHARED_EXPERTS_LAYOUT, has_draft_layer=True)
UNUSED_CONFIG_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
FLOAT32_TENSORS = _moe_config.SELECTION_BIAS_PATTERNS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Glm4MoeConfig."""
    defaults = ConfigDefaults(kv_heads=8, positions=131072, eps=1e-5)
    return decoder_config(raw, defaults, RouterConfig(128, 8), inner=1408, partial=0.5)


def decoder_config(
    raw: RawConfig, defaults: ConfigDefaults, router: RouterConfig, *, inner: int, partial: float
) -> DecoderConfig:
    """The decoder's sizes from a config.json.

    Args:
        raw: The config.
        defaults: What holds where it is silent.
        router: What the router is there.
        inner: An expert's channels there.
        partial: The part of each head that is rotated there.
    """
    bias, act = (
        read_boolean(raw, "attention_bias", False),
        read_activation(raw, "hidden_act", "silu"),
    )
    config = _llama_common.config_from_hf(
        raw,
        defaults,
        partial=partial,
        activation=act,
        qkv_bias=bias,
        qk_norm=read_boolean(raw, "use_qk_norm", False),
    )
    moe = _moe_config.moe_spec_with_shared_experts(
        config,
        _moe_config.group_limited_router(raw, router),
        positive_int(raw, "moe_intermediate_size", default=inner),
        positive_int(raw, "n_shared_experts", default=1, max_value=64),
    )
    return replace(
        config, moe=moe, dense_layers=_moe_config.leading_dense_layer_indices(raw, config.layers, 1)
    )
