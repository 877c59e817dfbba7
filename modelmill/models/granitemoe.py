"""Granite 3 with experts (``GraniteMoeForCausalLM``), whose matrices are stacked in the files."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import granite
from modelmill.models._llama_common import CHECKPOINT_NAMES
from modelmill.models._moe_config import STACKED_EXPERT_NAMES, softmax_router_config
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, **STACKED_EXPERT_NAMES}, experts_stacked=True
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GraniteMoeConfig."""
    config = granite.config_from_hf(with_config_overrides(raw, {"mlp_bias": False}))
    # a softmax over the chosen experts' logits
    router = softmax_router_config(
        raw, experts=8, top_k=2, renormalize=True, keys=("num_local_experts",)
    )
    expert = MLPSpec(config.hidden, config.inner, activation=config.activation)
    return replace(config, moe=MoESpec(router, expert))
