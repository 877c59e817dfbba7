"""Inputs of layers beside the stream (Gemma 3n and 4: per-layer embeddings).

Each token has a short vector for each layer, from a table and a projection of its embedding. A
layer gates it by its stream, and adds what a projection makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.layer_spec import LinearRowBlock, LinearSpec, ModuleSpec, QuantSiteSpec
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import ACTIVATION_FUNCTIONS
from modelmill.nn.norm import NormConfig, NormWithoutResidual
from modelmill.nn.step import Step

SUM_SCALE = 2.0**-0.5
"""Factor of the sum of both parts of a layer's vectors."""


@dataclass(frozen=True)
class PerLayerInputConfig:
    """The vectors of all layers.

    Attributes:
        vocab: Rows of the table.
        layers: Layers.
        width: Channels of a vector.
        hidden: Channels of the stream.
        eps: Of the norm of the projections.
    """

    vocab: int
    layers: int
    width: int
    hidden: int
    eps: float


class ScaledEmbedding(nn.Module):
    """Rows by id, times a factor."""

    weight: torch.Tensor

    def __init__(self, rows: int, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("weight", torch.empty(rows, width, device="meta"))

    def forward(self, ids: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T] → [T, width]."""
        return F.embedding(ids, self.weight) * self.scale


class ScaledProjection(nn.Module):
    """x Wᵀ / √columns; the matrix is never quantized."""

    weight: torch.Tensor

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.scale = columns**-0.5
        self.register_buffer("weight", torch.empty(rows, columns, device="meta"))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, columns] → [T, rows]."""
        return F.linear(x, self.weight) * self.scale


class FixedScaleSum(nn.Module):
    """The sum of two tensors, times ``SUM_SCALE``."""

    def forward(self, one: torch.Tensor, other: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """Both of one shape."""
        return (one + other) * SUM_SCALE


class PerLayerInputs(nn.Module):
    """Ids [T] and embeddings [T, H] → what each layer reads, [T, layers, width]."""

    def __init__(self, config: PerLayerInputConfig) -> None:
        super().__init__()
        self.config = config
        size = config.layers * config.width
        self.table = ScaledEmbedding(config.vocab, size, config.width**0.5)
        self.projection = ScaledProjection(config.hidden, size)
        self.norm = NormWithoutResidual(NormConfig(config.width, config.eps), reduces=False)
        self.sum = FixedScaleSum()

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: the embeddings."""
        rows = self.table(step.ids, step)
        projected = self.projection(x, step).reshape(-1, self.config.width)
        normed = self.norm(projected, step)
        mixed = self.sum(normed.view(rows.shape), rows, step)
        return mixed.unflatten(1, (self.config.layers, self.config.width))

    def attach_to_step(self, x: torch.Tensor, step: Step) -> Step:
        """The step with these inputs."""
        return replace(step, layer_inputs=self(x, step))


def per_layer_input_size(model: nn.Module) -> int:
    """Channels that a token has beside the stream, for all layers of a model together."""
    inputs = (each.config for each in model.modules() if isinstance(each, PerLayerInputs))
    return sum(config.layers * config.width for config in inputs)


@dataclass(frozen=True)
class PerLayerInputSpec:
    """What one layer does with its vector.

    Attributes:
        layer: The layer's number.
        width: Channels of the vector.
        activation: Of the gate, a name in ``ACTIVATION_FUNCTIONS``.
        norm: The norm behind the projection.
    """

    layer: int
    width: int
    activation: str
    norm: NormConfig

    def build_module(self) -> PerLayerInputBlock:
        """The module."""
        return PerLayerInputBlock(self)

    @property
    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of both products."""
        return QuantSiteSpec("input_gate"), QuantSiteSpec("input_up", heavy_tailed=True)

    def module_specs(self, reads: str) -> tuple[ModuleSpec, ...]:
        """The modules of a layer's ``layer_input``: the stream ``reads`` → "input_branch"."""
        return (
            LinearSpec(
                path="layer_input.gate_proj", reads=(reads,), writes=("input_gate",),
                site="input_gate", parts=(LinearRowBlock("input_gate", self.width),),
            ),
            ModuleSpec(
                path="layer_input.act", reads=("input_gate",), writes=("input_gated",),
                reference=("input_gated",), op=self.activation,
            ),
            LinearSpec(
                path="layer_input.up_proj", reads=("input_gated",), writes=("input_out",),
                site="input_up", parts=(LinearRowBlock("input_up", self.norm.width),),
            ),
            self.norm.make_module_spec(
                "layer_input.post", ("input_out",), ("input_branch",), "input_post"
            ),
        )  # fmt: skip


class PerLayerInputActAndMul(nn.Module):
    """activation(gate) times the layer's vector of each token."""

    def __init__(self, spec: PerLayerInputSpec) -> None:
        super().__init__()
        self.layer = spec.layer
        self.compute = ACTIVATION_FUNCTIONS[spec.activation]

    def forward(self, gate: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, P] → [T, P]."""
        assert step.layer_inputs is not None, "the model has made the inputs of its layers"
        return self.compute(gate) * step.layer_inputs[:, self.layer]


class PerLayerInputBlock(nn.Module):
    """norm(up(activation(gate(x)) · the layer's vector)); every rank computes all of it."""

    def __init__(self, spec: PerLayerInputSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.norm.width, spec.width)
        self.act = PerLayerInputActAndMul(spec)
        self.up_proj = Linear(spec.width, spec.norm.width)
        self.post = spec.norm.build_norm_without_residual()

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return self.post(self.up_proj(self.act(self.gate_proj(x, step), step), step), step)
