"""Int8 W8A8 linear for many rows on Hopper (gemm_8bit.cu).

Few rows are served by Triton.
"""

from __future__ import annotations

import torch

from modelmill.ops.cuda.w8a8_gemm import gemm_8bit
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import available as available
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import run as run

SMALL_M_LIMIT = 16  # rows up to which it is not worth it


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """As ``gemm_8bit.supports``, more than a few rows."""
    return x.shape[0] > SMALL_M_LIMIT and gemm_8bit.supports(x, weight, scale, x_scale, dtype, bias)


def specializations(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """Numbers of rows up to ``max_rows`` that cover every kernel config of this op."""
    return gemm_8bit.specializations(x, weight, SMALL_M_LIMIT, max_rows)
