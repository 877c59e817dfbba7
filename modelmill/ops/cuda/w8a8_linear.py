"""Products of many rows of int8 activations with int8 weights on Hopper (gemm_8bit.cu); few rows
are Triton's work.
"""

from __future__ import annotations

import torch

from modelmill.ops.cuda import gemm_8bit
from modelmill.ops.cuda.gemm_8bit import available as available
from modelmill.ops.cuda.gemm_8bit import run as run

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
    """Numbers of rows, up to ``max_rows``, with which every form of the kernel is met that such a
    product may take.
    """
    return gemm_8bit.specializations(x, weight, SMALL_M_LIMIT, max_rows)
