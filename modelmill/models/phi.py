"""Phi-1, 1.5 and 2: attention and MLP side by side behind one norm, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.models import _llama_common
from modelmill.models._hf_config import EVERY_BIAS, activation, boolean, non_negative_float
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.parallel_layer import ParallelLayer
from modelmill.nn.qkv_norm import SHARED_LAYER_NORM, QKNormConfig

CHECKPOINT_PREFIXES = ("model.",)
LAYOUT = CheckpointLayout(
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
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in PhiConfig."""
    return _llama_common.config_from_hf(
        raw,
        layer_norm="layer_norm_eps",
        partial=0.5,
        activation=activation(raw, "hidden_act", "gelu_new"),
        layer=ParallelLayer,
        gated=False,
        **EVERY_BIAS,
        head_bias=True,
        qkv_norm=qk_norm_config(raw, default=False),
    )


def qk_norm_config(raw: Mapping[str, Any], *, default: bool) -> QKNormConfig | None:
    """The norm of q and k, one of each for all heads."""
    eps = non_negative_float(raw, "layer_norm_eps", default=1e-5)
    normed = boolean(raw, "qk_layernorm", default)
    return QKNormConfig(SHARED_LAYER_NORM, eps) if normed else None


class Model(Decoder):
    """The decoder with parallel layers."""
