"""Feed-forward blocks: SwiGLU (``GatedMLP``) and GPT-2's GELU (``PlainMLP``)."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import torch
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.step import Step
from modelmill.parallel.shard import Range, Shard, partition
from modelmill.parallel.tp_group import TPGroup

# A rank's inner channels are a multiple of this where there are many: rows start at cache lines.
_CHANNEL_ALIGNMENT = 64


class SiluMul(nn.Module):
    """silu(gate) · up over a fused [T, 2·I]."""

    def forward(self, gate_up: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, 2·I] → [T, I]."""
        return step.ops.silu_mul(gate_up)


class GeluTanh(nn.Module):
    """GELU in its tanh approximation, GPT-2's activation."""

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Apply GELU elementwise to a tensor of any shape."""
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
        return self.down_proj(self.act(self.gate_up_proj(x, step), step), step)

    def shard(self, tp_group: TPGroup, alignment_for: Callable[[str], int]) -> None:
        """Keep this rank's inner channels; ``forward`` then returns a partial sum.

        Args:
            tp_group: The ranks that share the layer.
            alignment_for: Of a child's name, the multiple at which its columns may be cut.
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
        """Keep this rank's inner channels; ``forward`` then returns a partial sum.

        Args:
            tp_group: The ranks that share the layer.
            alignment_for: Of a child's name, the multiple at which its columns may be cut.
        """
        inner = _channel_range(self.down_proj.shape[1], tp_group, alignment_for("down_proj"))
        self.fc_proj.take_shard(Shard.from_rows(self.fc_proj.shape, inner))
        self.down_proj.take_shard(Shard.from_columns(self.down_proj.shape, inner, tp_group.rank))


def _channel_range(inner: int, tp_group: TPGroup, alignment: int) -> Range:
    """The inner channels of a rank."""
    aligned = lcm(alignment, _CHANNEL_ALIGNMENT)
    has_many = inner >= 8 * tp_group.size * aligned
    ranges = partition(inner, tp_group.size, aligned if has_many else alignment, "inner channels")
    return ranges[tp_group.rank]
