"""What LFM2's models have in common: their names of tensors, and layers of two kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelmill.core.read_tracking_config import (
    RawConfig,
    with_config_defaults,
    with_config_overrides,
)
from modelmill.models import _llama_common
from modelmill.models._hf_config import read_boolean
from modelmill.models._hybrid_config import recurrent_layers
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._mamba_config import conv_width
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.short_conv import ShortConvSpec

LFM2_NAMES = {
    **CHECKPOINT_NAMES,
    "attn_norm": ("operator_norm",),
    "attn.rope_cache.q_norm": ("self_attn.q_layernorm",),
    "attn.rope_cache.k_norm": ("self_attn.k_layernorm",),
    "attn.o_proj": ("self_attn.out_proj",),
    "attn.in_proj": ("conv.in_proj",),
    "attn.conv": ("conv.conv",),
    "attn.out_proj": ("conv.out_proj",),
    "mlp_norm": ("ffn_norm",),
    "mlp.gate_up_proj": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.down_proj": ("feed_forward.w2",),
}
SUPPORTED_VALUES = {"block_use_swiglu": (True,), "use_pos_enc": (True,)}
# of published files: of training, and sizes and an epsilon that transformers reads under other keys
UNUSED_CONFIG_KEYS = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads",
)  # fmt: skip


def hybrid_config(raw: RawConfig, layer_types: Any) -> DecoderConfig:
    """The sizes of a decoder whose layers are of these types."""
    raw = with_config_defaults(
        raw,
        {"num_key_value_heads": 8, "norm_eps": 1e-5},
        overrides={"tie_word_embeddings": _is_head_tied(raw)},
    )
    config = _llama_common.config_from_hf(
        with_config_overrides(raw, {"rms_norm_eps": raw["norm_eps"]}),
        ConfigDefaults(positions=128_000, theta=1e6),
        qk_norm=True,
    )
    conv = ShortConvSpec(
        config.hidden,
        conv_width(raw, "conv_L_cache", default=3),
        read_boolean(raw, "conv_bias", False),
    )
    recurrent = recurrent_layers(layer_types, config.layers, ("conv",))
    return replace(config, recurrence=conv, recurrent_layers=recurrent)


def _is_head_tied(raw: RawConfig) -> bool:
    """Whether the head is the embedding; ``tie_embedding`` is the key's older name."""
    older = raw.get("tie_embedding")
    key = "tie_word_embeddings" if older is None else "tie_embedding"
    return read_boolean(raw, key, True)
