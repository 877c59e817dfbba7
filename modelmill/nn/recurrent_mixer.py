"""A mixer with a recurrence of each head (Gated DeltaNet, Mamba2)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from modelmill.nn.causal_conv import CausalConv
from modelmill.nn.head_recurrence import PerHeadProjection, PerHeadRecurrence
from modelmill.nn.linear import Linear
from modelmill.nn.step import Step
from modelmill.parallel.shard import Range


class RecurrentMixer(nn.Module, ABC):
    """in_proj → short convolution → recurrence → norm gated by z → out_proj.

    Attributes:
        kv_heads: Heads of the vectors that several heads of the state share, on this rank.
        rates: What each head's recurrence decays by or adds, from the mixer's input.
    """

    in_proj: Linear
    rates: PerHeadProjection
    conv: CausalConv
    gated_norm: nn.Module
    out_proj: Linear

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads

    @property
    @abstractmethod
    def recurrence(self) -> PerHeadRecurrence:
        """The module with the state."""

    def forward(self, x: torch.Tensor, rope: object, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, H] → [T, H]."""
        projected = self.in_proj(x, step)
        scanned = self.recurrence(self.conv(projected, step), self.rates(x, step), step)
        return self.out_proj(self.gated_norm(scanned, projected, step), step)

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:
        """Keep a rank's heads, and the shared heads that they read."""
        self.kv_heads = kv_heads[1] - kv_heads[0]
        self.rates.keep_local_heads(heads)
        self.recurrence.keep_local_heads(heads)
