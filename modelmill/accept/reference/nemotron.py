"""nemotron: LayerNorm stored less 1, half a head rotated, the square of ReLU (arXiv:2402.16819)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.arcee import ArceeReference
from modelmill.accept.reference.base import ModuleWeights
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class NemotronReference(ArceeReference):
    """NemotronForCausalLM."""

    DEFAULTS = ReferenceDefaults(positions=4096, activation="relu2")
    uses_layer_norm = True
    EPS_KEY = "norm_eps"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.rope = self.build_partial_rope(factor=0.5)

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return weight and bias of a norm; the weight is stored less 1."""
        stored = super().norm_weights(index, name)
        return ModuleWeights(stored.weight + 1, stored.bias)


REFERENCE = NemotronReference
