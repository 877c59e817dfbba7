"""Feed-forward blocks: gated as SwiGLU (``GatedMLP``), or two plain matrices (``PlainMLP``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.layer_spec import (
    LinearRowBlock,
    LinearSpec,
    ModuleSpec,
    QuantSiteSpec,
    ScaleFoldRows,
    linear_tensor_names,
)
from modelmill.nn.linear import Linear
from modelmill.nn.partition import ChannelPartition
from modelmill.nn.step import Step
from modelmill.nn.xielu import XIELU, XIELU_TENSORS
from modelmill.ops.bound_op import CachedOpBinding
from modelmill.ops.fused_moe import SwigluOaiParams, swiglu_oai


class ActivationOp(nn.Module):
    """An activation that is an op of its own, the one named ``OP``."""

    OP: str

    def __init__(self) -> None:
        super().__init__()
        self._op = CachedOpBinding()

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Apply the op."""
        return self._op(getattr(step.ops, self.OP), x)


class SiluMul(ActivationOp):
    """silu(gate) · up over a fused [T, 2·I]: [T, 2·I] → [T, I]."""

    OP = "silu_mul"


class GeluTanh(ActivationOp):
    """GELU in its tanh approximation, GPT-2's activation, of a tensor of any shape."""

    OP = "gelu_tanh"


class Relu2(ActivationOp):
    """The square of ReLU, of a tensor of any shape."""

    OP = "relu2"


class ElementwiseActivation(nn.Module):
    """An activation without an op of its own: GELU, ReLU, or SiLU."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.compute = name, ACTIVATION_FUNCTIONS[name]

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """Apply it to a tensor of any shape."""
        return self.compute(x)


class ClampedSwiglu(nn.Module):
    """The gate of ``SwigluOaiParams`` over a fused [T, 2·I]."""

    def __init__(self, clamp: SwigluOaiParams) -> None:
        super().__init__()
        self.clamp = clamp

    def forward(self, gate_up: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, 2·I] → [T, I]."""
        return swiglu_oai(gate_up, self.clamp)


class GatedActivation(ElementwiseActivation):
    """activation(gate) · up over a fused [T, 2·I], of other activations than SiLU."""

    def forward(self, gate_up: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, 2·I] → [T, I]."""
        gate, up = gate_up.chunk(2, -1)
        return self.compute(gate) * up


ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


ACTIVATION_OP_MODULES = {"gelu_tanh": GeluTanh, "relu2": Relu2}
"""Those of a plain MLP that are ops of their own."""


def make_ungated_activation(name: str) -> nn.Module:
    """The activation between two matrices."""
    if name == XIELU.NAME:
        return XIELU()
    return (
        ACTIVATION_OP_MODULES[name]()
        if name in ACTIVATION_OP_MODULES
        else ElementwiseActivation(name)
    )


@dataclass(frozen=True)
class MLPSpec:
    """Sizes and switches of one layer's MLP.

    Attributes:
        gated: down(activation(gate(x)) · up(x)); otherwise down(activation(fc(x))).
        activation: A name in ACTIVATION_FUNCTIONS, or without a gate ``XIELU.NAME``.
        bias: Of all its linear layers.
        clamp: In the place of the activation, or None.
    """

    hidden: int
    inner: int
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    clamp: SwigluOaiParams | None = None

    @property
    def partitions(self) -> tuple[ChannelPartition, ...]:
        """How ranks divide the inner channels."""
        return (ChannelPartition("inner", self.inner),)

    def build_module(self) -> nn.Module:
        """The module."""
        if self.gated:
            return GatedMLP(self.hidden, self.inner, self.bias, self.activation, self.clamp)
        return PlainMLP(self.hidden, self.inner, self.bias, self.activation)

    def module_specs(self, reads: str = "mlp_input", site: str = "up") -> tuple[ModuleSpec, ...]:
        """The modules of a layer's ``mlp``, ``reads`` → "mlp_out"; site: of the first."""
        names = ("gate", "up") if self.gated else ("fc",)
        hidden = "gate_up" if self.gated else "fc"
        silu = "silu_mul" if self.gated else "silu"
        first = LinearSpec(
            path=f"mlp.{hidden}_proj",
            reads=(reads,),
            writes=(hidden,),
            site=site,
            parts=tuple(LinearRowBlock(name, self.inner, "inner") for name in names),
            tensors=linear_tensor_names(self.bias),
        )
        activation = ModuleSpec(
            path="mlp.act",
            reads=(hidden,),
            writes=("act",),
            reference=("act",),
            tensors=XIELU_TENSORS if self.activation == XIELU.NAME else (),
            op=silu if self.activation == "silu" and self.clamp is None else self.activation,
        )
        down = LinearSpec(
            path="mlp.down_proj",
            reads=("act",),
            writes=("mlp_out",),
            site="down",
            parts=(LinearRowBlock("down", self.hidden),),
            split_columns="inner",
            tensors=linear_tensor_names(self.bias),
        )
        return first, activation, down

    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of both products; a gated one's second is linear in up."""
        producer = ScaleFoldRows("mlp.gate_up_proj", "up") if self.is_linear_in_up else None
        return QuantSiteSpec("up"), QuantSiteSpec("down", producer, heavy_tailed=True)

    @property
    def is_linear_in_up(self) -> bool:
        """Whether the second product's input is linear in up."""
        return self.gated and self.clamp is None


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)), gate and up in one matrix, gate first."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        bias: bool = False,
        activation: str = "silu",
        clamp: SwigluOaiParams | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * inner, bias)
        self.act: nn.Module
        if clamp is not None:
            self.act = ClampedSwiglu(clamp)
        else:
            self.act = SiluMul() if activation == "silu" else GatedActivation(activation)
        self.down_proj = Linear(inner, hidden, bias)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return self.down_proj(self.act(self.gate_up_proj(x, step), step), step)


class PlainMLP(nn.Module):
    """down(activation(fc(x)))."""

    def __init__(
        self, hidden: int, inner: int, bias: bool = True, activation: str = "gelu_tanh"
    ) -> None:
        super().__init__()
        self.fc_proj = Linear(hidden, inner, bias)
        self.act = make_ungated_activation(activation)
        self.down_proj = Linear(inner, hidden, bias)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return self.down_proj(self.act(self.fc_proj(x, step), step), step)
