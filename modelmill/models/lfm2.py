"""LFM2 (``Lfm2ForCausalLM``): gated short convolutions beside a few attention layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    num_layers,
    optional_positive_float,
    positive_int,
    read_boolean,
)
from modelmill.models._hybrid_config import recurrent_layers
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._mamba_config import conv_width
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.short_conv import ShortConvSpec

Model = Decoder
NAMES = {
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
LAYOUT = CheckpointLayout(NAMES, norm="model.embedding_norm")
SUPPORTED_VALUES = {"block_use_swiglu": (True,), "use_pos_enc": (True,)}
# of published files: of training, and sizes and an epsilon that transformers reads under other keys
UNUSED_CONFIG_KEYS = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads",
)  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Lfm2Config."""
    raw = overlay_config(raw, {}, {"intermediate_size": _intermediate_size(raw)})
    return hybrid_config(raw, _layer_types(raw))


def hybrid_config(raw: RawConfig, layer_types: Any) -> DecoderConfig:
    """The sizes of a decoder whose layers are of these types."""
    raw = overlay_config(
        raw,
        {"num_key_value_heads": 8, "norm_eps": 1e-5},
        {"tie_word_embeddings": _is_head_tied(raw)},
    )
    config = _llama_common.config_from_hf(
        overlay_config(raw, {}, {"rms_norm_eps": raw["norm_eps"]}),
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


def _intermediate_size(raw: RawConfig) -> int:
    """Channels of the MLP: two thirds of the config's, times a factor, rounded up."""
    older = raw.get("block_ff_dim")
    inner = positive_int(raw, "intermediate_size" if older is None else "block_ff_dim")
    multiple = positive_int(raw, "block_multiple_of", default=256)
    factor = optional_positive_float(raw, "block_ffn_dim_multiplier", 1.0)
    if not read_boolean(raw, "block_auto_adjust_ff_dim", True):
        return inner
    inner = 2 * inner // 3
    return inner if factor is None else -(-int(factor * inner) // multiple) * multiple


def _layer_types(raw: RawConfig) -> Any:
    """``layer_types``, or those that ``full_attn_idxs`` means; without both all have attention.

    Raises:
        CheckpointError: for indices that are no list of layers.
    """
    if raw.get("layer_types") is not None:
        return raw["layer_types"]
    layers = num_layers(raw, "num_hidden_layers")
    listed = raw.get("full_attn_idxs")
    full = range(layers) if listed is None else listed
    if not isinstance(full, list | range) or any(
        type(each) is not int or not 0 <= each < layers for each in full
    ):
        raise CheckpointError(
            f"config.json: full_attn_idxs must be a list of layers below {layers}, not "
            f"{quote(full, 60)}"
        )
    return ["full_attention" if layer in full else "conv" for layer in range(layers)]
