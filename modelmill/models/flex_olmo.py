"""FlexOlmo: OLMo 2 with experts in the place of the MLP (arXiv:2507.07024)."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, non_negative_float, read_activation
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._moe_config import EXPERT_NAMES, norm_topk_router
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.models.olmo2 import POST_NORM_CHECKPOINT_NAMES
from modelmill.models.olmoe import QK_NORM_NAMES
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.post_norm import PostNormLayer
from modelmill.nn.qkv_norm import ALL_HEADS_RMS_NORM, QKNormConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**POST_NORM_CHECKPOINT_NAMES, **QK_NORM_NAMES, **EXPERT_NAMES}
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in FlexOlmoConfig."""
    act = read_activation(raw, "hidden_act", "silu")
    raw = with_config_defaults(raw, {"rms_norm_eps": 1e-6})
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=4096, theta=500000.0),
        activation=act,
        layer=PostNormLayer,
        **attention_bias_fields(raw),
        qkv_norm=QKNormConfig(ALL_HEADS_RMS_NORM, non_negative_float(raw, "rms_norm_eps")),
    )
    router = norm_topk_router(raw, experts=7, top_k=5, renormalize=False)
    return replace(
        config, moe=MoESpec(router, MLPSpec(config.hidden, config.inner, activation=act))
    )
