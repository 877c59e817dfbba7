"""Granite 3: LLaMA with factors on embeddings, scores, branches and logits (µP)."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _hf_config, _llama_common
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.sandwich import ScaledBranchLayer

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GraniteConfig."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(activation="silu"),
        layer=ScaledBranchLayer,
        **_hf_config.attention_and_mlp_bias_fields(raw),
        attention_scale=_hf_config.positive_float(raw, "attention_multiplier", default=1.0),
        embedding_scale=_hf_config.read_non_unit_factor(raw, "embedding_multiplier"),
        branch_scale=_hf_config.positive_float(raw, "residual_multiplier", default=1.0),
        logit_scale=1 / _hf_config.positive_float(raw, "logits_scaling", default=1.0),
    )
