"""OLMo 2: norms behind the branches instead of in front, and RMSNorm over all of q and of k."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, non_negative_float
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.post_norm import PostNormLayer
from modelmill.nn.qkv_norm import ALL_HEADS_RMS_NORM, QKNormConfig

Model = Decoder
POST_NORM_CHECKPOINT_NAMES = {
    **CHECKPOINT_NAMES,
    "attn_post": ("post_attention_layernorm",),
    "mlp_post": ("post_feedforward_layernorm",),
}
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**POST_NORM_CHECKPOINT_NAMES, "attn.qkv_norm": ("self_attn.q_norm", "self_attn.k_norm")}
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Olmo2Config."""
    eps = non_negative_float(raw, "rms_norm_eps", default=1e-5)
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(eps=1e-5, activation="silu"),
        layer=PostNormLayer,
        **attention_bias_fields(raw),
        qkv_norm=QKNormConfig(ALL_HEADS_RMS_NORM, eps),
    )
