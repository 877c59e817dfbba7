"""BitNet b1.58: LLaMA with the square of ReLU and a norm in front of each last product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import activation, attention_bias, head_dim_override, positive_int
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.models._llama_common import CHECKPOINT_NAMES, CHECKPOINT_PREFIXES
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["CHECKPOINT_PREFIXES", "Model", "config_from_hf", "ignored_tensors", "rules"]

LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES,
        "attn.out_norm": ("self_attn.attn_sub_norm",),
        "mlp.norm": ("mlp.ffn_sub_norm",),
    }
)
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors
UNUSED_CONFIG_KEYS = ("auto_map",)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in BitNetConfig."""
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    raw = overlay_config(raw, {"num_key_value_heads": 5}, head_dim_override(raw, hidden, heads))
    return _llama_common.config_from_hf(
        raw,
        eps=1e-5,
        theta=500000.0,
        activation=activation(raw, "hidden_act", "relu2"),
        **attention_bias(raw),
        sub_norms=True,
    )


class Model(Decoder):
    """The decoder with norms in front of the last products."""
