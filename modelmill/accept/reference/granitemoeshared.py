"""granitemoeshared: factors of µP, experts, and an MLP that every token has beside them."""

from __future__ import annotations

from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.moe import GraniteMoeReference


class GraniteMoeSharedReference(GraniteMoeReference):
    """GraniteMoeSharedForCausalLM."""

    def mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's experts, and the MLP beside them."""
        weights = super().mlp_weights(index)
        if not self.config.get("shared_intermediate_size"):
            return weights
        stem = f"{self.LAYERS}.{index}.shared_mlp"
        gate, up = self.source.get(f"{stem}.input_linear.weight").chunk(2)
        down = self.source.get(f"{stem}.output_linear.weight")
        parts = {"gate": gate, "up": up, "down": down}
        return weights | {
            f"shared_expert.{name}": ModuleWeights(part) for name, part in parts.items()
        }

    def run_shared_expert(self, r: LayerRecorder, x: Tensor) -> Tensor:
        """Run the MLP beside the experts."""
        return self.run_expert(r, "shared_expert", x)


REFERENCE = GraniteMoeSharedReference
