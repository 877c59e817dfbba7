"""GLM-4 9B and GLM-Edge (``GlmForCausalLM``): half of each head rotates, by neighbours."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import read_boolean
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_NAMES = {**CHECKPOINT_NAMES, "mlp.gate_up_proj": ("mlp.gate_up_proj",)}
CHECKPOINT_LAYOUT = CheckpointLayout(CHECKPOINT_NAMES, neighbours=True)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GlmConfig."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(
            kv_heads=2, head_dim=128, positions=131072, eps=1.5625e-07, activation="silu"
        ),
        partial=0.5,
        qkv_bias=read_boolean(raw, "attention_bias", True),
    )
