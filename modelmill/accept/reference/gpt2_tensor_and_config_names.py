"""Families whose tensors are named as GPT-2's, and whose config has older names of its sizes."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.tensor_source import TensorSource


class Gpt2NamesReference(PlainDecoderReference):
    """A decoder with LayerNorm in ``transformer.h``.

    Attributes:
        OLDER_KEYS: names of sizes → the family's own, which have precedence.
    """

    EMBEDDING = "transformer.wte.weight"
    FINAL_NORM = "transformer.ln_f"
    LAYERS = "transformer.h"
    EPS_KEY = "layer_norm_epsilon"
    OLDER_KEYS: tuple[tuple[str, str], ...] = (
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("max_position_embeddings", "n_positions"),
    )
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        own = {name: config.get(older) for name, older in self.OLDER_KEYS}
        named = {name: value for name, value in own.items() if value is not None}
        super().__init__(source, config | named)
