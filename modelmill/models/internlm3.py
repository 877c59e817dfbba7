"""InternLM3: LLaMA with a bias on q, k and v, and one on the other matrices, each by a switch."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import first_set_key, read_boolean
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; ``attention_bias`` and ``mlp_bias`` are newer names."""
    raw = with_config_defaults(raw, {"num_key_value_heads": 2, "head_dim": 128})
    bias = read_boolean(raw, first_set_key(raw, ("bias", "mlp_bias")), False)
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=32768, eps=1e-5, activation="silu"),
        qkv_bias=read_boolean(raw, first_set_key(raw, ("qkv_bias", "attention_bias")), False),
        out_bias=bias,
        mlp_bias=bias,
    )
