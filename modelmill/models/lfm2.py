"""LFM2 (``Lfm2ForCausalLM``): gated short convolutions beside a few attention layers."""

from __future__ import annotations

from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _lfm2_config
from modelmill.models._hf_config import (
    num_layers,
    optional_positive_float,
    positive_int,
    read_boolean,
)
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(_lfm2_config.LFM2_NAMES, norm="model.embedding_norm")
SUPPORTED_VALUES = _lfm2_config.SUPPORTED_VALUES
UNUSED_CONFIG_KEYS = _lfm2_config.UNUSED_CONFIG_KEYS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Lfm2Config."""
    raw = with_config_overrides(raw, {"intermediate_size": _intermediate_size(raw)})
    return _lfm2_config.hybrid_config(raw, _layer_types(raw))


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
