"""Gemma 2: soft caps of scores and logits, norms around the branches, every other layer a window.

arXiv:2408.00118. Norms are stored less 1.
"""

from __future__ import annotations

from typing import Any

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_bias_fields,
    num_layers,
    optional_positive_float,
    positive_float,
    positive_int,
    read_activation,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.sandwich import SandwichLayer

Model = Decoder
GEMMA2_NORM_NAMES = {
    "attn_post": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_post": ("post_feedforward_layernorm",),
}
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, **GEMMA2_NORM_NAMES}, norms_less_one=True)
# "hidden_act" of older files is not read by transformers either: "hidden_activation" is
UNUSED_CONFIG_KEYS = ("cache_implementation", "hidden_act", "sliding_window_size")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Gemma2Config."""
    layers = num_layers(raw, "num_hidden_layers")
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=4, head_dim=256, positions=8192, tied=True),
        **shared_gemma_fields(raw),
        windows=_llama_common.windows_with_full_every_nth_layer(raw, layers, 2),
        logit_softcap=optional_positive_float(raw, "final_logit_softcapping", 30.0),
        attention_softcap=optional_positive_float(raw, "attn_logit_softcapping", 50.0),
    )


def shared_gemma_fields(raw: RawConfig) -> dict[str, Any]:
    """Fields of DecoderConfig that Gemma 3 reads alike."""
    return {
        "activation": read_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        "layer": SandwichLayer,
        "attention_scale": positive_float(raw, "query_pre_attn_scalar", default=256.0) ** -0.5,
        "embedding_scale": positive_int(raw, "hidden_size") ** 0.5,
        **attention_bias_fields(raw),
    }
