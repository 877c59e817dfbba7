"""Persimmon: LayerNorm, also of q and k, half of each head rotated, the square of ReLU."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    ALL_BIASES_ENABLED,
    checked_default_head_dim_override,
    positive_int,
)
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._megatron_names import layer_checkpoint_names
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.models.phi import qk_norm_config
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **layer_checkpoint_names("self_attn"),
        "attn.qkv_norm": ("self_attn.q_layernorm", "self_attn.k_layernorm"),
    },
    norm="model.final_layernorm",
    grouped_qkv=True,
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in PersimmonConfig."""
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    sizes = {**checked_default_head_dim_override(raw, hidden, heads), "num_key_value_heads": None}
    return _llama_common.config_from_hf(
        with_config_overrides(raw, sizes),
        ConfigDefaults(positions=16384, activation="relu2"),
        layer_norm="layer_norm_eps",
        partial=0.5,
        gated=False,
        **ALL_BIASES_ENABLED,
        qkv_norm=qk_norm_config(raw, default=True),
    )
