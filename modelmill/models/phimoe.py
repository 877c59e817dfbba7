"""Phi-3.5-MoE: LayerNorm, biases, LongRoPE, two experts of a token chosen one after the other."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common, mixtral
from modelmill.models._hf_config import (
    attention_bias_fields,
    config_object,
    non_negative_float,
    positive_float,
    read_activation,
    read_boolean,
)
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._moe_config import softmax_router_config
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import SPARSE_MIXER
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
CHECKPOINT_LAYOUT = mixtral.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = ("input_jitter_noise", "original_max_position_embeddings")
SPARSE_MIXER_TOP_K = 2
"""Experts of a token in SparseMixer."""
LONGROPE_TYPE_NAMES = ("longrope", "su", "yarn")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in PhimoeConfig."""
    raw = _with_attention_factor(raw)
    act = read_activation(raw, "hidden_act", "silu")
    config = _llama_common.config_from_hf(
        raw, ConfigDefaults(kv_heads=8, positions=131072, theta=1e6), layer_norm="rms_norm_eps",
        rope_options={"longrope": True},
        activation=act, **attention_bias_fields(raw),
        head_bias=read_boolean(raw, "lm_head_bias", False),
    )  # fmt: skip
    router = softmax_router_config(
        raw, experts=16, top_k=SPARSE_MIXER_TOP_K, renormalize=False, keys=("num_local_experts",)
    )
    if router.top_k != SPARSE_MIXER_TOP_K:
        raise CheckpointError(
            f"config.json: num_experts_per_tok={router.top_k} is not supported (supported: 2)"
        )
    jitter = non_negative_float(raw, "router_jitter_noise", default=0.01)
    router = replace(router, scores=SPARSE_MIXER, jitter=jitter)
    moe = MoESpec(router, MLPSpec(config.hidden, config.inner, activation=act))
    return _llama_common.with_sliding_window(raw, replace(config, moe=moe))


def _with_attention_factor(raw: RawConfig) -> RawConfig:
    """The config with LongRoPE's ``short_mscale`` and ``long_mscale`` as ``attention_factor``.

    Raises:
        CheckpointError: where they differ, and for other scalings.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = config_object(key, raw.get(key))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return raw
    if kind not in LONGROPE_TYPE_NAMES:
        raise CheckpointError(f"config.json: {key}: {quote(kind, 60)} is not supported: longrope")
    short, long = (positive_float(scaling, name) for name in ("short_mscale", "long_mscale"))
    if short != long:
        raise CheckpointError(
            f"config.json: {key}.long_mscale={long:g} is not supported beside short_mscale="
            f"{short:g}; they must be equal"
        )
    rest = {name: value for name, value in scaling.items() if not name.endswith("_mscale")}
    return with_config_overrides(raw, {key: {**rest, "attention_factor": short}})
