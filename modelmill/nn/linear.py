"""A linear layer; the product is its weight format's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from modelmill.nn.step import Step
from modelmill.parallel.shard import Shard
from modelmill.weights.base import WeightFormat


class WeightChangeCounter:
    """How many weights all layers got so far: tells a reader of many that one was replaced."""

    def __init__(self) -> None:
        self.count = 0

    def count_change(self) -> None:
        """A layer got a weight."""
        self.count += 1


weight_change_counter = WeightChangeCounter()


class Linear(nn.Module):
    """y = x Wᵀ + b. The loader puts ``weight`` in place, in whichever format it was stored.

    Attributes:
        shape: (N, K) of this rank's part.
        bias: [N] or None.
        weight_shard: This rank's part of the whole matrix; None: all of it.
    """

    weight: WeightFormat
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.shape = (out_features, in_features)
        self.weight_shard: Shard | None = None
        self.register_buffer("bias", torch.empty(out_features, device="meta") if bias else None)

    def __setattr__(self, name: str, value: Any) -> None:
        """As any module's; counts the weights that are put in place."""
        if name == "weight":
            weight_change_counter.count_change()
        super().__setattr__(name, value)

    def restrict_to_shard(self, shard: Shard) -> None:
        """Keep only a part; called before the weight is put in place."""
        assert shard.full_shape == self.shape, "a part of another matrix"
        self.weight_shard, self.shape = shard, shard.shape
        if self.bias is not None:
            self.bias = torch.empty(shard.shape[0], device="meta") if shard.has_bias else None

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, K] → [T, N]."""
        return self.weight.matmul(x, self.bias, step.ops)
