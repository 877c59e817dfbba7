"""Dense matrix product with a weight stored as [N, K]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.kernel_support import make_dense_gemm_problem
from modelmill.ops.linear_cases import DECODE_7B_SHAPES, DENSE_SHAPES, dense_args, linear_case
from modelmill.ops.op_cost import gemm_cost

DECLARATION = OpDeclaration(
    problem=make_dense_gemm_problem, operands=("x", "weight", "bias"), cost=gemm_cost
)

# For cases whose outputs have unit scale (weights scaled by 1/sqrt(K)).
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}

AMX_K_ALIGNMENT = 32  # of 16-bit values: an AMX tile row


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x · weightᵀ + bias.

    With AMX, oneDNN (torch 2.13) reads 16-bit rows up to a multiple of 32 columns and multiplies
    the values beyond K (the next row or unrelated memory) by zero; a NaN there would make this row
    NaN. Such rows are therefore padded with zeros first.

    Args:
        x: [T, K].
        weight: [N, K], x's dtype.
        bias: [N], x's dtype, or None.

    Returns:
        [T, N] of x's dtype.
    """
    padding = -x.shape[-1] % AMX_K_ALIGNMENT
    if padding and x.device.type == "cpu" and x.dtype.itemsize == 2:
        return F.linear(F.pad(x, (0, padding)), F.pad(weight, (0, padding)), bias)
    return F.linear(x, weight, bias)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode (one and a few rows) and prefill, odd sizes; the 7B shapes only on a GPU."""
    shapes = DENSE_SHAPES
    if device != "cpu":
        shapes = [*shapes, *DECODE_7B_SHAPES, (8, 4096, 4096), (64, 4096, 4096)]
    for rows, k, n in shapes:
        yield linear_case(
            dense_args(
                rows, k, n, device=device, dtype=dtype, x_seed=rows + k + n, has_bias=n % 2 == 1
            )
        )
