"""Command R and R+ (``CohereForCausalLM``): parallel layers, neighbouring channels rotated."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_bias_fields,
    non_negative_float,
    positive_float,
    positive_int,
    read_boolean,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout, SourceTensors
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM_WITHOUT_BIAS
from modelmill.nn.parallel_residual_layer import ParallelResidualLayer
from modelmill.nn.qkv_norm import PER_HEAD_LAYER_NORM, QKNormConfig

Model = Decoder
# a matrix [heads, channels] each
PER_HEAD_QK_NORM_SOURCES = SourceTensors(
    ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), "cat0+flatten"
)
CHECKPOINT_LAYOUT = CheckpointLayout(
    CHECKPOINT_NAMES, neighbours=True, tensors={"attn.qkv_norm.weight": PER_HEAD_QK_NORM_SOURCES}
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in CohereConfig."""
    eps = non_negative_float(raw, "layer_norm_eps", default=1e-5)
    raw = _with_model_max_length(raw)
    normed = read_boolean(raw, "use_qk_norm", False)
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=8192, tied=True, theta=500000.0, activation="silu"),
        layer_norm="layer_norm_eps",
        norm=LAYER_NORM_WITHOUT_BIAS,
        layer=ParallelResidualLayer,
        **attention_bias_fields(raw),
        logit_scale=positive_float(raw, "logit_scale", default=0.0625),
        qkv_norm=QKNormConfig(PER_HEAD_LAYER_NORM, eps) if normed else None,
    )


def _with_model_max_length(raw: RawConfig) -> RawConfig:
    """The config with the length of Command R's ``model_max_length``, if nothing is scaled.

    Its ``max_position_embeddings`` is that of the first part of the training.
    """
    if raw.get("rope_scaling") is not None or raw.get("model_max_length") is None:
        return raw
    shortest = positive_int(raw, "max_position_embeddings", default=8192)
    longest = positive_int(raw, "model_max_length")
    return with_config_overrides(raw, {"max_position_embeddings": max(shortest, longest)})
