"""LLaMA and everything of its model_type: LLaMA 1–3, Vicuna, SmolLM2, TinyLlama, …"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.models import _llama_names
from modelmill.models._llama_names import PREFIXES, drops, rules
from modelmill.models._raw import switch
from modelmill.nn.decoder import Decoder, DecoderConfig

__all__ = ["PREFIXES", "Model", "configure", "drops", "rules"]


def configure(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; biases only where the config asks for them."""
    attention_bias = switch(raw, "attention_bias", False)
    config = _llama_names.configure(
        raw, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=switch(raw, "mlp_bias", False)
    )
    return _llama_names.no_windows(raw, config)


UNUSED = ("max_window_layers",)  # there are no windows


class Model(Decoder):
    """The plain decoder."""
