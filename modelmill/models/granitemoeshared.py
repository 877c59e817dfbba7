"""Granite with experts and an MLP beside them (``GraniteMoeSharedForCausalLM``)."""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import granitemoe
from modelmill.models._hf_config import positive_int
from modelmill.models._llama_common import CHECKPOINT_NAMES
from modelmill.models._moe_config import SHARED_EXPERT_PATH, STACKED_EXPERT_NAMES
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.models.granitemoehybrid import SHARED_MLP_NAMES, with_separate_gate_up_sources
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES,
        **STACKED_EXPERT_NAMES,
        **{f"{SHARED_EXPERT_PATH}.{name}": each for name, each in SHARED_MLP_NAMES.items()},
    },
    experts_stacked=True,
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GraniteMoeSharedConfig."""
    config = granitemoe.config_from_hf(raw)
    assert config.moe is not None, "a Granite with experts"
    if raw.get("shared_intermediate_size") in (None, 0):
        return config
    shared = replace(config.moe.expert, inner=positive_int(raw, "shared_intermediate_size"))
    return replace(config, moe=replace(config.moe, shared=shared))


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor of the model."""
    return with_separate_gate_up_sources(CHECKPOINT_LAYOUT.rename_rules(config))
