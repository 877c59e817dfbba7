"""Feed-forward blocks."""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.step import Step


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

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        inner = self.gate_up_proj.gated(x, step) if step.whole else None
        if inner is None:
            inner = self.act(self.gate_up_proj(x, step), step)
        return self.down_proj(inner, step)


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
