"""MiniCPM 1, 2 and 4, dense: LLaMA with factors on embeddings, branches and logits (µP)."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_bias_fields,
    num_layers,
    positive_float,
    positive_int,
    read_non_unit_factor,
)
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.sandwich import ScaledBranchLayer

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT
SUPPORTED_VALUES = {"scale_emb": (), "scale_depth": (), "num_experts": (0,), "sparse_config": ()}
UNUSED_CONFIG_KEYS = ("mup_denominator",)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; branches are scaled by ``scale_depth`` / √layers."""
    depth = num_layers(raw, "num_hidden_layers") ** 0.5
    width = positive_int(raw, "dim_model_base", default=1) / positive_int(raw, "hidden_size")
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(tied=True),
        rope_options={"longrope": True},
        layer=ScaledBranchLayer,
        **attention_bias_fields(raw),
        embedding_scale=read_non_unit_factor(raw, "scale_emb"),
        branch_scale=positive_float(raw, "scale_depth", default=1.0) / depth,
        logit_scale=width,
    )
