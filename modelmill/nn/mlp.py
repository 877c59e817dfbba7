"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import torch
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.step import Step
from modelmill.ops.quant_types import QuantizedInput
from modelmill.parallel.shard import Range, Shard, partition
from modelmill.parallel.tp_group import TPGroup

_CHANNEL_ALIGNMENT = (
    # channels that a rank's share is a multiple of where there are many: rows then start at cache
    # lines
    64
)


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
        self, x: torch.Tensor | QuantizedInput, step: Step, residual: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """[T, H] → [T, H]; None where it was added to the residual at once."""
        inner = self.gate_up_proj.try_linear_swiglu(x, step) if step.fuse else None
        if inner is None:
            gate_up = self.gate_up_proj(x, step)
            out = self.down_proj.try_swiglu_quant(gate_up, step) if step.fuse else None
            if out is not None:
                return out
            inner = self.act(gate_up, step)
        return (
            None
            if self.down_proj.try_linear_add(inner, residual, step)
            else self.down_proj(inner, step)
        )

    def shard(self, tp_group: TPGroup, alignment_for: Callable[[str], int]) -> None:
        """Keep some inner channels; what ``forward`` returns is then a summand.

        alignment_for: of a child's columns.
        """
        inner = self.down_proj.shape[1]
        a, b = _channel_range(inner, tp_group, alignment_for("down_proj"))
        self.gate_up_proj.take_shard(
            Shard.from_rows(self.gate_up_proj.shape, (a, b), (inner + a, inner + b))
        )
        self.down_proj.take_shard(Shard.from_columns(self.down_proj.shape, (a, b), tp_group.rank))


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

    def shard(self, tp_group: TPGroup, alignment_for: Callable[[str], int]) -> None:
        """Keep some inner channels; what ``forward`` returns is then a summand.

        alignment_for: of a child's columns.
        """
        mine = _channel_range(self.down_proj.shape[1], tp_group, alignment_for("down_proj"))
        self.fc_proj.take_shard(Shard.from_rows(self.fc_proj.shape, mine))
        self.down_proj.take_shard(Shard.from_columns(self.down_proj.shape, mine, tp_group.rank))


def _channel_range(inner: int, tp_group: TPGroup, alignment: int) -> Range:
    """The inner channels of a rank."""
    lines = lcm(alignment, _CHANNEL_ALIGNMENT)
    return partition(
        inner,
        tp_group.size,
        lines if inner >= 8 * tp_group.size * lines else alignment,
        "inner channels",
    )[tp_group.rank]
