"""LFM3 (``Lfm3ForCausalLM``): LFM2 with windows, gated heads, and norms around the branches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _gemma4_config, _hybrid_config, _llama_common
from modelmill.models._hf_config import (
    attention_bias_fields,
    non_negative_float,
    num_layers,
    positive_int,
    read_boolean,
)
from modelmill.models._lfm2_config import LFM2_NAMES
from modelmill.models._llama_common import SLIDING_ATTENTION, ConfigDefaults
from modelmill.models._mamba_config import conv_width
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.pre_norm import PreNormLayer
from modelmill.nn.sandwich import SandwichLayer
from modelmill.nn.short_conv import ShortConvSpec

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **LFM2_NAMES,
        "attn.rope_cache.q_norm": ("self_attn.q_norm",),
        "attn.rope_cache.k_norm": ("self_attn.k_norm",),
        "attn.o_proj": ("self_attn.o_proj",), "attn.gate_proj": ("self_attn.gate_proj",),
        "attn_post": ("post_operator_norm",), "mlp_post": ("post_ffn_norm",),
    },
    norm="model.embedding_norm", separate_gates=True,
)  # fmt: skip
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {"rope_scaling": ({},), "rope_theta": ()}
CONFIG_DEFAULTS = ConfigDefaults(kv_heads=4, head_dim=128, positions=128_000, tied=True)
DEFAULT_ROPES = {
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 1e4},
    _llama_common.FULL_ATTENTION: {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Lfm3Config."""
    layers = num_layers(raw, "num_hidden_layers")
    types = raw.get("layer_types") or [_default_layer_type(layer) for layer in range(layers)]
    attention = (*_hybrid_config.ATTENTION_TYPES, SLIDING_ATTENTION)
    recurrent = _hybrid_config.recurrent_layers(types, layers, ("conv",), attention)
    size = positive_int(raw, "sliding_window", default=256)
    plain = dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"))
    eps = non_negative_float(raw, "norm_eps", "rms_norm_eps", default=1e-5)
    config = _llama_common.config_from_hf(
        with_config_overrides(raw, {**plain, "rms_norm_eps": eps}), CONFIG_DEFAULTS,
        qk_norm=True, output_gate=read_boolean(raw, "use_attention_gate", True), head_gates=True,
        gate_bias=False, **attention_bias_fields(raw),
        layer=SandwichLayer if read_boolean(raw, "use_sandwich_norm", True) else PreNormLayer,
        windows=tuple(size if each == SLIDING_ATTENTION else None for each in types),
    )  # fmt: skip
    width = conv_width(raw, "conv_L_cache", default=7)
    conv = ShortConvSpec(config.hidden, width, read_boolean(raw, "conv_bias", False))
    full, local = (
        _gemma4_config.layer_type_rope(
            raw, each, config.head_dim, config.max_len, default=DEFAULT_ROPES
        )
        for each in (_llama_common.FULL_ATTENTION, SLIDING_ATTENTION)
    )
    own = local if any(config.windows) else None
    return replace(config, rope=full, local_rope=own, recurrence=conv, recurrent_layers=recurrent)


def _default_layer_type(layer: int) -> str:
    """Full attention in every fourth layer, a window two layers behind, convolutions between."""
    if layer % 4 == 2:
        return _llama_common.FULL_ATTENTION
    return SLIDING_ATTENTION if layer % 4 == 0 and layer else "conv"
