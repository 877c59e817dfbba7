"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import torch
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.step import Step
from modelmill.ops.eight_bit import Quantized
from modelmill.parallel.mesh import Mesh
from modelmill.parallel.shard import Part, Range, spread

_LINE = 64  # channels that a rank's share is a multiple of where there are many: rows then start at cache lines


class SiluMul(nn.Module):
    """silu(gate) · up over a fused [T, 2·I]."""

    def forward(self, gate_up: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, 2·I] → [T, I]."""
        return step.ops.silu_mul(gate_up)


class GeluTanh(nn.Module):
    """GPT-2's activation."""

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Any shape."""
        return step.ops.gelu_tanh(x)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up in one matrix, gate first."""

    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * inner, bias)
        self.act = SiluMul()
        self.down_proj = Linear(inner, hidden, bias)

    def forward(
        self, x: torch.Tensor | Quantized, step: Step, residual: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """[T, H] → [T, H]; None where it was added to the residual at once."""
        inner = self.gate_up_proj.gated(x, step) if step.whole else None
        if inner is None:
            gate_up = self.gate_up_proj(x, step)
            out = self.down_proj.of_gate(gate_up, step) if step.whole else None
            if out is not None:
                return out
            inner = self.act(gate_up, step)
        return None if self.down_proj.added(inner, residual, step) else self.down_proj(inner, step)

    def split(self, mesh: Mesh, grain: Callable[[str], int]) -> None:
        """Keep some inner channels; what ``forward`` returns is then a summand. grain: of a child's columns."""
        inner = self.down_proj.shape[1]
        a, b = _channels(inner, mesh, grain("down_proj"))
        self.gate_up_proj.take(Part.of_rows(self.gate_up_proj.shape, (a, b), (inner + a, inner + b)))
        self.down_proj.take(Part.of_columns(self.down_proj.shape, (a, b), mesh.rank))


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

    def split(self, mesh: Mesh, grain: Callable[[str], int]) -> None:
        """Keep some inner channels; what ``forward`` returns is then a summand. grain: of a child's columns."""
        mine = _channels(self.down_proj.shape[1], mesh, grain("down_proj"))
        self.fc_proj.take(Part.of_rows(self.fc_proj.shape, mine))
        self.down_proj.take(Part.of_columns(self.down_proj.shape, mine, mesh.rank))


def _channels(inner: int, mesh: Mesh, grain: int) -> Range:
    """The inner channels of a rank."""
    lines = lcm(grain, _LINE)
    return spread(inner, mesh.size, lines if inner >= 8 * mesh.size * lines else grain, "inner channels")[mesh.rank]
