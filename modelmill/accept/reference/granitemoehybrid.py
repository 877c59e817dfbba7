"""granitemoehybrid: Mamba2 and attention, factors of µP, experts beside an MLP, or an MLP alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.hybrid_layers import HybridLayersMixin
from modelmill.accept.reference.mamba2 import Mamba2Mixin
from modelmill.accept.reference.moe import GraniteMoeReference
from modelmill.accept.reference.tensor_source import TensorSource

RECURRENT_TYPES = ("mamba", "linear_attention")


class GraniteMoeHybridReference(HybridLayersMixin, Mamba2Mixin, GraniteMoeReference):
    """GraniteMoeHybridForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        if config.get("position_embedding_type") != "rope":
            self.rope = None
        if config.get("num_local_experts") == 0:
            self.dense_layers = set(range(self.num_layers))
        inner = int(config.get("mamba_expand", 2)) * self.hidden_size
        self.ssm_heads = int(config.get("mamba_n_heads", 128))
        self.ssm_dim = inner // self.ssm_heads
        self.ssm_state = int(config.get("mamba_d_state", 256))
        self.ssm_groups = int(config.get("mamba_n_groups", 1))
        self.ssm_bias = bool(config.get("mamba_proj_bias", False))
        self.conv_bias = bool(config.get("mamba_conv_bias", True))
        types = config.get("layer_types") or config.get("layers_block_type")
        self.recurrent = [
            types is None or each in RECURRENT_TYPES for each in self._layer_types_or_blanks(types)
        ]

    def _layer_types_or_blanks(self, types: list[str] | None) -> list[str]:
        return types or [""] * self.num_layers

    def token_mixer_weights(self, index: int) -> LayerWeights:
        """Read a layer's attention or recurrence."""
        if self.recurrent[index]:
            return self.ssm_weights(f"{self.LAYERS}.{index}.mamba")
        return super().token_mixer_weights(index)

    def mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's MLP, and the experts beside it."""
        stem = f"{self.LAYERS}.{index}.shared_mlp"
        gate, up = self.source.get(f"{stem}.input_linear.weight").chunk(2)
        down = self.source.get(f"{stem}.output_linear.weight")
        mlp = {"gate": ModuleWeights(gate), "up": ModuleWeights(up), "down": ModuleWeights(down)}
        if index in self.dense_layers:
            return mlp
        shared = {f"shared_expert.{name}": affine for name, affine in mlp.items()}
        return super().mlp_weights(index) | shared

    def run_shared_expert(self, r: LayerRecorder, x: Tensor) -> Tensor:
        """Run the MLP beside the experts."""
        return self.run_expert(r, "shared_expert", x)

    def run_recurrent_mixer(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a layer's recurrence, with its output projection."""
        return self.run_ssm_mixer(r, normed)


REFERENCE = GraniteMoeHybridReference
