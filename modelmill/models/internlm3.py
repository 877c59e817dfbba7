"""InternLM3: LLaMA with a bias on q, k and v, and one on the other matrices, each by a switch."""

from __future__ import annotations

from modelmill.core.config_view import RawConfig, overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import boolean
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
LAYOUT = _llama_common.LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; ``attention_bias`` and ``mlp_bias`` are newer names."""
    newer = {"qkv_bias": raw.get("attention_bias"), "bias": raw.get("mlp_bias")}
    below = {key: value for key, value in newer.items() if value is not None}
    raw = overlay_config(raw, {"num_key_value_heads": 2, "head_dim": 128, **below})
    bias = boolean(raw, "bias", False)
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=32768, eps=1e-5, activation="silu"),
        qkv_bias=boolean(raw, "qkv_bias", False),
        out_bias=bias,
        mlp_bias=bias,
    )
