"""VaultGemma: Gemma 2 without the norms behind the branches (arXiv:2510.15001)."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import gemma2
from modelmill.models._llama_common import CHECKPOINT_NAMES
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.pre_norm import PreNormLayer

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, "mlp_norm": ("pre_feedforward_layernorm",)}, norms_less_one=True
)
UNUSED_CONFIG_KEYS = gemma2.UNUSED_CONFIG_KEYS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in VaultGemmaConfig."""
    return replace(gemma2.config_from_hf(raw), layer=PreNormLayer)
