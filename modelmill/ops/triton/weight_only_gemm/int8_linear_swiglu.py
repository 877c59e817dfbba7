"""Gate and up projections with int8 weights for decoding, in one kernel."""

from __future__ import annotations

import torch

from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.gemm_16bit.linear import MAX_ROWS, gemm_small_m, gemv


def supports(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """Up to 16 rows in 16 bits, or one row in float32; contiguous rows of x and weight."""
    if x.dim() != 2 or not 0 < x.shape[0] <= MAX_ROWS or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    return x.dtype != torch.float32 or x.shape[0] == 1


def run(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the op: integers in x's dtype; sums, scale and bias in float32."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    if x.shape[0] == 1:
        gemv(x, weight, scale, bias, out)
    else:
        gemm_small_m(x, weight, scale, bias, out)
    return out
