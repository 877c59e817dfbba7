"""AFM (``ArceeForCausalLM``): LLaMA with an MLP of two matrices and the square of ReLU."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_and_mlp_bias_fields
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, "mlp.fc_proj": ("mlp.up_proj",)})


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in ArceeConfig."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=4096, eps=1e-5, activation="relu2"),
        gated=False,
        **attention_and_mlp_bias_fields(raw),
    )
