"""Mamba2 (``Mamba2ForCausalLM``, Codestral Mamba): a state space model without attention or MLP."""

from __future__ import annotations

from typing import Any

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models._hf_config import (
    non_negative_float,
    num_layers,
    positive_int,
    read_boolean,
    require_supported_value,
)
from modelmill.models._mamba_config import (
    MAMBA_CHECKPOINT_NAMES,
    conv_width,
    read_mamba_heads_dim_and_groups,
    time_step_limit,
)
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mamba2 import Mamba2Spec
from modelmill.nn.pre_norm import MixerLayer

Model = Decoder
DEFAULT_MAX_LEN = 1 << 18  # there are no positions; Codestral Mamba was tried up to here
CHECKPOINT_LAYOUT = CheckpointLayout(
    {"attn_norm": ("norm",), **MAMBA_CHECKPOINT_NAMES},
    layers="backbone.layers",
    embed="backbone.embeddings",
    norm="backbone.norm_f",
)
# of training and of other implementations' arithmetic; the residual stream has the build's dtype,
# and the gate is in front of the norm, although Codestral Mamba's config has norm_before_gate=true;
# nothing reads intermediate_size: the inner size is expand times hidden_size
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {"layer_types": ()}  # no layer has attention
UNUSED_CONFIG_KEYS = (
    "time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "chunk_size",
    "rescale_prenorm_residual", "residual_in_fp32", "norm_before_gate",
    "time_step_init_scheme", "time_step_scale", "intermediate_size",
)  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Mamba2Config."""
    require_supported_value(raw, "hidden_act", ("silu", "swish"), "silu")
    require_supported_value(raw, "rms_norm", (True,), True)
    hidden, expand = positive_int(raw, "hidden_size"), positive_int(raw, "expand", default=2)
    raw = with_config_defaults(raw, {"head_dim": 64})
    heads, dim, groups = read_mamba_heads_dim_and_groups(
        raw, expand * hidden, ("num_heads", "head_dim", "n_groups"), groups=8
    )
    eps = non_negative_float(raw, "layer_norm_epsilon", default=1e-5)
    state = Mamba2Spec(
        hidden, heads, dim, positive_int(raw, "state_size", default=128, max_value=1024), groups,
        conv_width(raw, "conv_kernel"), eps, read_boolean(raw, "use_bias", False),
        read_boolean(raw, "use_conv_bias", True), time_step_limit(raw),
    )  # fmt: skip
    layers = num_layers(raw, "num_hidden_layers")
    return DecoderConfig(
        hidden, expand * hidden, layers, heads, heads, dim, positive_int(raw, "vocab_size"), eps,
        DEFAULT_MAX_LEN, rope=None, tied=read_boolean(raw, "tie_word_embeddings", False),
        layer=MixerLayer, recurrence=state, recurrent_layers=frozenset(range(layers)),
    )  # fmt: skip
