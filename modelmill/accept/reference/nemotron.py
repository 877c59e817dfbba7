"""nemotron: LayerNorm stored less 1, half a head rotated, the square of ReLU (arXiv:2402.16819)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.arcee import PLAIN_MLP
from modelmill.accept.reference.base import Affine
from modelmill.accept.reference.plain_decoder import (
    MIXER,
    PROJECTIONS,
    Defaults,
    PlainDecoderReference,
)
from modelmill.accept.reference.tensor_source import TensorSource


class NemotronReference(PlainDecoderReference):
    """NemotronForCausalLM."""

    DEFAULTS = Defaults(positions=4096)
    uses_layer_norm = True
    EPS_KEY = "norm_eps"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.activation = self.read_activation("hidden_act", "relu2")
        self.rope = self.partial_rope(factor=0.5)
        self.projection_paths = {name: PROJECTIONS[name] for name in MIXER} | PLAIN_MLP
        self.biased = self.projections_with_bias() | self.projections_with_bias(
            "mlp_bias", PLAIN_MLP
        )

    def norm_weights(self, index: int | None, name: str) -> Affine:
        """Return weight and bias of a norm; the weight is stored less 1."""
        stored = super().norm_weights(index, name)
        return Affine(stored.weight + 1, stored.bias)


REFERENCE = NemotronReference
