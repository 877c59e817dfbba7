"""BitNet b1.58: LLaMA with the square of ReLU and a norm in front of each last product."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_bias_fields,
    checked_default_head_dim_override,
    positive_int,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES,
        "attn.out_norm": ("self_attn.attn_sub_norm",),
        "mlp.norm": ("mlp.ffn_sub_norm",),
    }
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in BitNetConfig."""
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    raw = with_config_overrides(raw, checked_default_head_dim_override(raw, hidden, heads))
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=5, eps=1e-5, theta=500000.0, activation="relu2"),
        **attention_bias_fields(raw),
        sub_norms=True,
    )
