"""Persimmon: LayerNorm, also of q and k, half of each head rotated, the square of ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import EVERY_BIAS, activation, head_dim_override, positive_int
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.models._megatron_names import layer_checkpoint_names
from modelmill.models.phi import qk_norm_config
from modelmill.nn.decoder import Decoder, DecoderConfig

CHECKPOINT_PREFIXES = ("model.",)
LAYOUT = CheckpointLayout(
    {
        **layer_checkpoint_names("self_attn"),
        "attn.qkv_norm": ("self_attn.q_layernorm", "self_attn.k_layernorm"),
    },
    norm="model.final_layernorm",
    grouped_qkv=True,
)
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in PersimmonConfig."""
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    sizes = {**head_dim_override(raw, hidden, heads), "num_key_value_heads": None}
    return _llama_common.config_from_hf(
        overlay_config(raw, {}, sizes),
        positions=16384,
        layer_norm="layer_norm_eps",
        partial=0.5,
        activation=activation(raw, "hidden_act", "relu2"),
        gated=False,
        **EVERY_BIAS,
        qkv_norm=qk_norm_config(raw, default=True),
    )


class Model(Decoder):
    """The decoder with normed queries and keys."""
