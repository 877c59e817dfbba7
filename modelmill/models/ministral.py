"""Ministral 8B: Mistral with a window in the layers that ``layer_types`` names, or in all."""

from __future__ import annotations

from modelmill.models._llama_common import CHECKPOINT_PREFIXES, ignored_tensors, rules
from modelmill.models.mistral import config_from_hf
from modelmill.nn.decoder import Decoder

__all__ = ["CHECKPOINT_PREFIXES", "Model", "config_from_hf", "ignored_tensors", "rules"]


class Model(Decoder):
    """The plain decoder with windows."""
