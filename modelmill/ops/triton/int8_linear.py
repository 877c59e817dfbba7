"""Products with int8 weights: converted in registers on the way to the multiply, scaled once at the end."""

from __future__ import annotations

import torch

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.linear import tile, vector

MOST = 1024  # from here a whole converted copy costs less than converting each tile for every block of rows


def supports(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """1 to 1,024 rows; rows of x and weight contiguous."""
    return x.dim() == 2 and 1 <= x.shape[0] <= MOST and x.stride(1) == 1 and weight.stride(1) == 1


def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference: the integers in x's dtype, sums, scale and bias in float32."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if x.shape[0] == 1:
        vector(x, weight, scale, bias, out)
    else:
        tile(x, weight, scale, bias, out)
    return out
