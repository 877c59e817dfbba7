"""Gemma 1: LLaMA with GELU, scaled embeddings, and norms that are stored less 1."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, positive_int, read_activation
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(CHECKPOINT_NAMES, norms_less_one=True)
SUPPORTED_VALUES = {"hidden_activation": ("gelu_pytorch_tanh",)}


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; "gelu" means its tanh approximation, as in GemmaConfig."""
    act = read_activation(raw, "hidden_act", "gelu_pytorch_tanh")
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=16, head_dim=256, positions=8192, tied=True),
        activation="gelu_tanh" if act == "gelu" else act,
        embedding_scale=positive_int(raw, "hidden_size") ** 0.5,
        **attention_bias_fields(raw),
    )
