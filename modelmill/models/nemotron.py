"""Nemotron-4 and Minitron: LayerNorm stored less 1, half a head rotated, the square of ReLU."""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_and_mlp_bias_fields
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, "mlp.fc_proj": ("mlp.up_proj",)})
# older names of partial_rotary_factor, which transformers does not read
SUPPORTED_VALUES = {"rope_percent": (0.5,), "rope_percentage": (0.5,)}


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in NemotronConfig."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=4096, activation="relu2"),
        layer_norm="norm_eps",
        partial=0.5,
        gated=False,
        **attention_and_mlp_bias_fields(raw),
    )


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor; the norms' weights, and not their biases, are stored less 1."""
    return [
        replace(rule, how=f"{rule.how}+plus_one") if rule.target.endswith("norm.weight") else rule
        for rule in CHECKPOINT_LAYOUT.rename_rules(config)
    ]
