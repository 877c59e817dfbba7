"""Mixtral: Mistral with eight experts in the place of the MLP (arXiv:2401.04088)."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import read_activation
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._moe_config import softmax_router_config
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
EXPERT_PATH = "block_sparse_moe.experts.*"
MIXTRAL_EXPERT_NAMES = {
    "mlp.router": ("block_sparse_moe.gate",),
    "mlp.experts.*.gate_up_proj": (f"{EXPERT_PATH}.w1", f"{EXPERT_PATH}.w3"),
    "mlp.experts.*.down_proj": (f"{EXPERT_PATH}.w2",),
}
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, **MIXTRAL_EXPERT_NAMES})


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in MixtralConfig."""
    act = read_activation(raw, "hidden_act", "silu")
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=8, positions=131072, eps=1e-5, theta=1e6),
        activation=act,
    )
    router = softmax_router_config(raw, experts=8, top_k=2, renormalize=True)
    moe = MoESpec(router, MLPSpec(config.hidden, config.inner, activation=act))
    return _llama_common.with_sliding_window(raw, replace(config, moe=moe))
