"""OLMoE: experts, and RMSNorm over all of q and of k (arXiv:2409.02060)."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_bias_fields,
    non_negative_float,
    optional_positive_float,
    read_activation,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._moe_config import EXPERT_NAMES, norm_topk_router
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.qkv_norm import ALL_HEADS_RMS_NORM, QKNormConfig

Model = Decoder
QK_NORM_NAMES = {"attn.qkv_norm": ("self_attn.q_norm", "self_attn.k_norm")}
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, **QK_NORM_NAMES, **EXPERT_NAMES})


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in OlmoeConfig."""
    act = read_activation(raw, "hidden_act", "silu")
    eps = non_negative_float(raw, "rms_norm_eps", default=1e-5)
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=4096, eps=1e-5),
        activation=act,
        **attention_bias_fields(raw),
        qkv_norm=QKNormConfig(ALL_HEADS_RMS_NORM, eps),
        qkv_clip=optional_positive_float(raw, "clip_qkv"),
    )
    router = norm_topk_router(raw, experts=64, top_k=8, renormalize=False)
    expert = MLPSpec(config.hidden, config.inner, activation=act)
    return replace(config, moe=MoESpec(router, expert))
