"""The gated pair of products of one row with int8 weights: eight rows of the gate and the same of up to a tile."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import one_row
from modelmill.ops.cuda.int8_linear import available as available
from modelmill.ops.cuda.int8_linear import supports as supports


def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference: the integers in x's dtype, sums, scale and bias in float32."""
    return one_row.product(x, weight, (scale, None, x.shape[1]), (None, None, bias), x.dtype, gated=True)
