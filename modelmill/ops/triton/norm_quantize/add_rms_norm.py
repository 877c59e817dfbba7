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

from modelmill.ops.row_range import RowRange
from modelmill.ops.triton.common.device import as_rows, row_launch
from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait
from modelmill.ops.triton.norm_quantize.rms_norm import MAX_WIDTH

SUPPORTED_PROBLEMS = (RowRange(max_width=MAX_WIDTH, same_dtype=True),)


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op; the sum overwrites ``residual`` if that is contiguous."""
    flat, flat_residual = as_rows(x), as_rows(residual)
    rows, width = flat.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = residual if residual.is_contiguous() else torch.empty_like(out).view(x.shape)
    rows_per_program, block, warps = row_launch(flat)
    pdl, fixed = (
        pdl_launch_options(x.device, rows),
        (width, flat.stride(0), flat_residual.stride(0)),
    )
    _launcher(
        (-(-rows // rows_per_program), 1, 1),
        (flat, flat_residual, weight, out, total),
        (rows, *fixed, eps),
        fixed,
        (rows_per_program, block, pdl["PDL"]),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )
    return out.view(x.shape), total


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, rows, width, x_stride, residual_stride,
    eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    residual = tl.load(
        residual_ptr + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0
    )
    # Rounded to x's dtype before the statistics, as two separate ops would do.
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row[:, None] * width + column[None, :], total, mask=inside)
    total32 = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total32 * total32, axis=1) / width + eps)
    normal = (total32 * scale[:, None]).to(x.dtype).to(tl.float32)
    out = normal * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * width + column[None, :], out.to(x.dtype), mask=inside)


_launcher = CachedLauncher(_kernel)
