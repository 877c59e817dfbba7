"""LLaMA and everything of its model_type: LLaMA 1–3, Vicuna, SmolLM2, TinyLlama and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias, boolean
from modelmill.models._llama_common import CHECKPOINT_PREFIXES, ignored_tensors, rules
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["CHECKPOINT_PREFIXES", "Model", "config_from_hf", "ignored_tensors", "rules"]


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; biases only where the config sets them."""
    config = _llama_common.config_from_hf(
        raw,
        **attention_bias(raw),
        mlp_bias=boolean(raw, "mlp_bias", False),
    )
    return _llama_common.refuse_sliding_windows(raw, config)


UNUSED_CONFIG_KEYS = ("max_window_layers",)  # there are no windows


class Model(Decoder):
    """LLaMA: the decoder as ``nn/decoder.py`` has it."""
