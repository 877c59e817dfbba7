"""A gated pair of products of many rows in 8 bits on Hopper, and its gate (gemm_8bit.cu)."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.w8a8_gemm import gemm_8bit
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import available as available

SMALL_M_LIMIT = 64  # rows up to which a kernel of its own for the gate is no slower


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """As ``gemm_8bit.supports``, more than a few rows, halves in eights."""
    return (
        x.shape[0] > SMALL_M_LIMIT
        and weight.shape[0] % 16 == 0
        and gemm_8bit.supports(x, weight, scale, x_scale, dtype, bias)
    )


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, rounded once after the gate."""
    return gemm_8bit.run(x, weight, scale, x_scale, dtype, bias, gated=True)


def specializations(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """Numbers of rows up to ``max_rows`` that cover every kernel config of this op."""
    return gemm_8bit.specializations(x, weight, SMALL_M_LIMIT, max_rows, gated=True)
