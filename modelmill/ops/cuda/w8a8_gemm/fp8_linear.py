"""Fp8 linear for many rows on Hopper (gemm_8bit.cu).

Few rows, or 16-bit activations, are served by Triton.

So are thousands of rows where torch has a product for them, which is faster there: SAM's ViT-H in
fp8 took 9.45 ms with this one and 8.98 with torch's, eight pictures 72.2 and 63.0.
"""

from __future__ import annotations

import torch

from modelmill.ops.cuda.w8a8_gemm import gemm_8bit
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import available as available

SMALL_M_LIMIT = 16  # rows up to which it is not worth it
TORCH_MIN_ROWS = 2048  # rows from which torch's is taken


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """As ``gemm_8bit.supports``, more than a few rows of fp8."""
    if x_scale is None or x.shape[0] <= SMALL_M_LIMIT:
        return False
    if (
        x.shape[0] >= TORCH_MIN_ROWS
        and dtype == torch.bfloat16
        and not (weight.shape[0] | weight.shape[1]) % 16
    ):
        return False
    return gemm_8bit.supports(x, weight, scale, x_scale, dtype, bias)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, but that tensor cores keep fewer bits of the sums than float32 has."""
    assert x_scale is not None, "as supports says"
    return gemm_8bit.run(x, weight, scale, x_scale, dtype, bias)


def specializations(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """Numbers of rows up to ``max_rows`` that cover every kernel config of this op."""
    max_rows = (
        max_rows if (weight.shape[0] | weight.shape[1]) % 16 else min(max_rows, TORCH_MIN_ROWS - 1)
    )
    return gemm_8bit.specializations(x, weight, SMALL_M_LIMIT, max_rows)
