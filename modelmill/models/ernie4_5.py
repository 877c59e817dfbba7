"""ERNIE 4.5, dense: LLaMA with neighbouring channels rotated, one bias switch for all matrices."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import linear_bias_fields
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(CHECKPOINT_NAMES, neighbours=True)
CONFIG_DEFAULTS = ConfigDefaults(
    kv_heads=2, head_dim=128, positions=131072, eps=1e-5, tied=True, theta=5e5, activation="silu"
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Ernie4_5Config."""
    return _llama_common.config_from_hf(
        raw, CONFIG_DEFAULTS, **linear_bias_fields(raw, "use_bias", False)
    )
