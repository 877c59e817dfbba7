"""Phi-1, 1.5 and 2: attention and MLP side by side behind one norm, biases everywhere."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    ALL_BIASES_ENABLED,
    non_negative_float,
    read_boolean,
    require_supported_value,
)
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.parallel_residual_layer import ParallelResidualLayer
from modelmill.nn.qkv_norm import SHARED_HEAD_LAYER_NORM, QKNormConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    norm="model.final_layernorm",
    names={
        "attn_norm": ("input_layernorm",),
        "attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.qkv_norm": ("self_attn.q_layernorm", "self_attn.k_layernorm"),
        "attn.o_proj": ("self_attn.dense",),
        "mlp.fc_proj": ("mlp.fc1",),
        "mlp.down_proj": ("mlp.fc2",),
    },
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in PhiConfig."""
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(activation="gelu_new"),
        layer_norm="layer_norm_eps",
        partial=0.5,
        layer=ParallelResidualLayer,
        gated=False,
        **ALL_BIASES_ENABLED,
        head_bias=True,
        qkv_norm=qk_norm_config(raw, default=False),
    )
    # a second name of the same in files of 2023
    require_supported_value(raw, "rotary_dim", (config.rope.dim if config.rope else 0, None), None)
    return config


def qk_norm_config(raw: RawConfig, *, default: bool) -> QKNormConfig | None:
    """The norm of q and k, one of each for all heads."""
    eps = non_negative_float(raw, "layer_norm_eps", default=1e-5)
    normed = read_boolean(raw, "qk_layernorm", default)
    return QKNormConfig(SHARED_HEAD_LAYER_NORM, eps) if normed else None
