"""Residual add and RMSNorm: two reads and two writes per value; the sum overwrites the residual.

Computes: residual[M, N] += x[M, N]; out[M, N] = rmsnorm(residual) · weight[N]
Dtypes: bfloat16, float16 or float32; float32 arithmetic
Layout: rows
Range: any M; N ≤ 32,768
Technique: whole rows in registers, cached launcher, PDL
Ops: add_rms_norm
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.triton.common.device import as_rows
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_wait_and_trigger
from modelmill.ops.triton.norm_quantize.rms_norm import (
    MAX_WIDTH,
    launch_row_kernel,
    load_row_indices_and_weight,
    rms_normalize,
)

SUPPORTED_PROBLEMS = (RowOpSupportRange(max_width=MAX_WIDTH, same_dtype=True),)


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op; the sum overwrites ``residual`` if that is contiguous."""
    flat, flat_residual = as_rows(x), as_rows(residual)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    total = residual if residual.is_contiguous() else torch.empty_like(out).view(x.shape)
    tensors = (flat, flat_residual, weight, out, total)
    launch_row_kernel(_launcher, tensors, (flat.stride(0), flat_residual.stride(0)), eps)
    return out.view(x.shape), total


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, rows, width, x_stride, residual_stride,
    eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, column, inside, weight = load_row_indices_and_weight(weight_ptr, rows, width, ROWS, BLOCK)
    pdl_wait_and_trigger(PDL)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    residual = tl.load(
        residual_ptr + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0
    )
    # Rounded to x's dtype before the statistics, as two separate ops would do.
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row[:, None] * width + column[None, :], total, mask=inside)
    out = rms_normalize(total, weight, width, eps)
    tl.store(out_ptr + row[:, None] * width + column[None, :], out, mask=inside)


_launcher = CachedLauncher(_kernel)
