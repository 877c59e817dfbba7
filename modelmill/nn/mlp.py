"""Feed-forward blocks: SwiGLU (``GatedMLP``) and GPT-2's GELU (``PlainMLP``)."""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.layer_spec import (
    LinearSpec,
    ModuleSpec,
    Part,
    RowProducer,
    SiteSpec,
    linear_tensors,
)
from modelmill.nn.linear import Linear
from modelmill.nn.step import Step
from modelmill.ops.binding import OpBinding


class SiluMul(nn.Module):
    """silu(gate) · up over a fused [T, 2·I]."""

    def __init__(self) -> None:
        super().__init__()
        self._op = OpBinding()

    def forward(self, gate_up: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, 2·I] → [T, I]."""
        return self._op(step.ops.silu_mul, gate_up)


class GeluTanh(nn.Module):
    """GELU in its tanh approximation, GPT-2's activation."""

    def __init__(self) -> None:
        super().__init__()
        self._op = OpBinding()

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Apply GELU elementwise to a tensor of any shape."""
        return self._op(step.ops.gelu_tanh, x)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up in one matrix, gate first."""

    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * inner, bias)
        self.act = SiluMul()
        self.down_proj = Linear(inner, hidden, bias)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return self.down_proj(self.act(self.gate_up_proj(x, step), step), step)

    @staticmethod
    def module_specs(hidden: int, inner: int, bias: bool = False) -> tuple[ModuleSpec, ...]:
        """Its modules as a layer's ``mlp``; "mlp_input" → "mlp_out"."""
        rows = Part("gate", inner, "inner"), Part("up", inner, "inner")
        return _module_specs("gate_up", rows, "silu_mul", hidden, bias)

    @staticmethod
    def site_specs() -> tuple[SiteSpec, ...]:
        """The inputs of both products; the second is linear in up."""
        producer = RowProducer("mlp.gate_up_proj", "up")
        return SiteSpec("up"), SiteSpec("down", producer, heavy_tailed=True)


class PlainMLP(nn.Module):
    """down(gelu(fc(x))), with biases."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc_proj = Linear(hidden, inner, True)
        self.act = GeluTanh()
        self.down_proj = Linear(inner, hidden, True)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return self.down_proj(self.act(self.fc_proj(x, step), step), step)

    @staticmethod
    def module_specs(hidden: int, inner: int) -> tuple[ModuleSpec, ...]:
        """Its modules as a layer's ``mlp``; "mlp_input" → "mlp_out"."""
        return _module_specs("fc", (Part("fc", inner, "inner"),), "gelu_tanh", hidden, bias=True)

    @staticmethod
    def site_specs() -> tuple[SiteSpec, ...]:
        """The inputs of both products; the second is linear in none of its inputs."""
        return SiteSpec("up"), SiteSpec("down", heavy_tailed=True)


def _module_specs(
    first: str, rows: tuple[Part, ...], op: str, hidden: int, bias: bool
) -> tuple[ModuleSpec, ...]:
    """A product with these rows, an activation, a product.

    Args:
        first: The value between the first product and the activation.
        rows: Of the first product.
        op: The activation.
        hidden: Channels of the layer's stream.
        bias: Whether both products have one.
    """
    return (
        LinearSpec(
            path=f"mlp.{first}_proj",
            reads=("mlp_input",),
            writes=(first,),
            site="up",
            parts=rows,
            tensors=linear_tensors(bias),
        ),
        ModuleSpec(path="mlp.act", reads=(first,), writes=("act",), reference=("act",), op=op),
        LinearSpec(
            path="mlp.down_proj",
            reads=("act",),
            writes=("mlp_out",),
            site="down",
            parts=(Part("down", hidden),),
            split_columns="inner",
            tensors=linear_tensors(bias),
        ),
    )
