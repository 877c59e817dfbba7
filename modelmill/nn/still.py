"""What the modules of an image model need to know besides their input: no tokens, no cache, only the ops."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from modelmill.nn.linear import Linear
from modelmill.ops.shelf import Ops


@dataclass(frozen=True)
class Still:
    """One forward pass over images."""

    ops: Ops = field(repr=False)

    def linear(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """[…, K] → […, N], whatever form the weight is held in."""
        flat = x.reshape(-1, x.shape[-1])
        return layer.held.matmul(flat, layer.bias, self.ops).view(*x.shape[:-1], -1)
