"""opt: learned positions that begin at row 2, LayerNorm, ReLU (arXiv:2205.01068)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture


class OptReference(PlainDecoderReference):
    """OPTForCausalLM with norms in front of the branches."""

    DEFAULTS = ReferenceDefaults(tied=True)
    EMBEDDING = "model.decoder.embed_tokens.weight"
    POSITIONS = "model.decoder.embed_positions.weight"
    FINAL_NORM = "model.decoder.final_layer_norm"
    LAYERS = "model.decoder.layers"
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        if not config.get("do_layer_norm_before", True):
            raise UnknownArchitecture("norms behind the sums (OPT-350M) are not known here")
        self.eps = 1e-5
        self.activation = self.activation_from_config("activation_function", "relu")
        self.norm_paths = {"input_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
        attention = {name: f"self_attn.{name}_proj" for name in ("q", "k", "v")}
        self.projection_paths = attention | {
            "o_proj": "self_attn.out_proj",
            "fc": "fc1",
            "down": "fc2",
        }
        self.biased = self.projections_with_bias("enable_bias", self.projection_paths, default=True)
        self.norms_have_weights = bool(config.get("layer_norm_elementwise_affine", True))

    def embed(self, ids: Tensor) -> Tensor:
        """Add each position's row, which is two rows further down."""
        places = torch.arange(len(ids)) + 2
        return super().embed(ids) + self.source.rows(self.POSITIONS, places)

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return weight and bias of a norm, which has none in some models."""
        if self.norms_have_weights:
            return super().norm_weights(index, name)
        return ModuleWeights(torch.ones(self.hidden_size))

    def embedding_table_names(self) -> dict[str, str]:
        """Return the checkpoint's name of each embedding table."""
        return {"weight": self.EMBEDDING, "positions": self.POSITIONS}


REFERENCE = OptReference
