"""Gemma 3, text (``Gemma3ForCausalLM``): norms around the branches, windows with their rotation.

Five of six layers have a window and an unscaled rotation of a smaller base. Norms are stored less
1.
"""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common, gemma2
from modelmill.models._hf_config import (
    num_layers,
    optional_positive_float,
    positive_float,
    positive_int,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, **gemma2.GEMMA2_NORM_NAMES}, norms_less_one=True
)
DEFAULT_MAX_POSITIONS = 131072
UNUSED_CONFIG_KEYS = ("cache_implementation", "_sliding_window_pattern")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Gemma3TextConfig."""
    below = {"num_key_value_heads": 4, "head_dim": 256}
    raw = with_config_defaults(raw, below)
    local = positive_float(raw, "rope_local_base_freq", default=10000.0)
    full, local_raw = _llama_common.full_and_local_rope_configs(raw, 1000000.0, local)
    layers = num_layers(raw, "num_hidden_layers")
    windows = _llama_common.windows_with_full_every_nth_layer(raw, layers, 6, has_pattern=True)
    # the length behind the scaling, which is by 8 from 4B on
    length = positive_int(raw, "max_position_embeddings", default=DEFAULT_MAX_POSITIONS)
    config = replace(_decoder_config_with_one_rope(full, raw), max_len=length)
    return replace(
        config, windows=windows, local_rope=_decoder_config_with_one_rope(local_raw, raw).rope
    )


def _decoder_config_with_one_rope(rotated: RawConfig, raw: RawConfig) -> DecoderConfig:
    """The config with one of the two rotations."""
    return _llama_common.config_from_hf(
        rotated,
        ConfigDefaults(positions=DEFAULT_MAX_POSITIONS, tied=True),
        qk_norm=True,
        **gemma2.shared_gemma_fields(raw),
        logit_softcap=optional_positive_float(raw, "final_logit_softcapping"),
    )
