"""IQuest-Coder (``IQuestCoderForCausalLM``): LLaMA under another name."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_and_mlp_bias_fields
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT
SUPPORTED_VALUES = {"use_sliding_window": (False,), "layer_types": ()}


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in IQuestCoderConfig."""
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=8, head_dim=128, positions=131072, eps=1e-5, activation="silu"),
        **attention_and_mlp_bias_fields(raw),
    )
