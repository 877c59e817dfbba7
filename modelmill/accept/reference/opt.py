"""opt: learned positions that begin at row 2, LayerNorm, ReLU (arXiv:2205.01068)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

MODEL_TYPES = ("opt",)
NAME_PREFIX = "model."


class OptReference(PlainDecoderReference):
    """OPTForCausalLM with norms in front of the branches."""

    EMBEDDING = "model.decoder.embed_tokens.weight"
    POSITIONS = "model.decoder.embed_positions.weight"
    FINAL_NORM = "model.decoder.final_layer_norm"
    LAYERS = "model.decoder.layers"
    TIED_BY_DEFAULT = True
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        if not config.get("do_layer_norm_before", True):
            raise UnknownArchitecture("norms behind the sums (OPT-350M) are not known here")
        self.eps = 1e-5
        self.activation = self.read_activation("activation_function", "relu")
        self.norm_paths = {"input_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
        attention = {name: f"self_attn.{name}_proj" for name in ("q", "k", "v")}
        self.projection_paths = attention | {
            "o_proj": "self_attn.out_proj",
            "fc": "fc1",
            "down": "fc2",
        }
        if config.get("enable_bias", True):
            self.biased = frozenset(self.projection_paths)

    def embed(self, ids: Tensor) -> Tensor:
        """Add each position's row, which is two rows further down."""
        places = torch.arange(len(ids)) + 2
        return super().embed(ids) + self.source.rows(self.POSITIONS, places)

    def embedding_tables(self) -> dict[str, str]:
        """Return the checkpoint's name of each embedding table."""
        return {"weight": self.EMBEDDING, "positions": self.POSITIONS}


REFERENCE = OptReference
