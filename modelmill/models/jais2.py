"""Jais 2 (``Jais2ForCausalLM``): LLaMA with LayerNorm, biases, and the square of ReLU."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common, arcee
from modelmill.models._hf_config import attention_bias_fields, read_boolean
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = arcee.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Jais2Config."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=8192, activation="relu2"),
        layer_norm="layer_norm_eps",
        gated=False,
        **attention_bias_fields(raw, default=True),
        mlp_bias=read_boolean(raw, "mlp_bias", True),
    )
