"""IQuest-Coder (``IQuestCoderForCausalLM``): LLaMA under another name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import activation, attention_bias, boolean
from modelmill.models._llama_common import CHECKPOINT_PREFIXES, ignored_tensors, rules
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["CHECKPOINT_PREFIXES", "Model", "config_from_hf", "ignored_tensors", "rules"]

SUPPORTED_VALUES = {"use_sliding_window": (False,), "layer_types": ()}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in IQuestCoderConfig."""
    return _llama_common.config_from_hf(
        overlay_config(raw, {"num_key_value_heads": 8, "head_dim": 128}),
        positions=131072,
        eps=1e-5,
        activation=activation(raw, "hidden_act", "silu"),
        **attention_bias(raw),
        mlp_bias=boolean(raw, "mlp_bias", False),
    )


class Model(Decoder):
    """The plain decoder."""
