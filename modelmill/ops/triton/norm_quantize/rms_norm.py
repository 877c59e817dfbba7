"""RMSNorm with whole rows in registers: x is read once.

Computes: out[M, N] = rmsnorm(x[M, N]) · weight[N]
Dtypes: bfloat16, float16 or float32; float32 arithmetic
Layout: rows
Range: any M; N ≤ 32,768
Technique: whole rows in registers, cached launcher, PDL
Ops: rms_norm
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

MAX_WIDTH = 32768
SUPPORTED_PROBLEMS = (RowRange(max_width=MAX_WIDTH, same_dtype=True),)


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Run the op: statistics in float32, cast, then the weight."""
    flat = as_rows(x)
    rows, width = flat.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    rows_per_program, block, warps = row_launch(flat)
    pdl, fixed = pdl_launch_options(x.device, rows), (width, flat.stride(0))
    _launcher(
        (-(-rows // rows_per_program), 1, 1),
        (flat, weight, out),
        (rows, *fixed, eps),
        fixed,
        (rows_per_program, block, pdl["PDL"]),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )
    return out.view(x.shape)


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, weight_ptr, out_ptr, rows, width, stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / width + eps)
    normal = (x32 * scale[:, None]).to(x.dtype).to(tl.float32)
    out = normal * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * width + column[None, :], out.to(x.dtype), mask=inside)


_launcher = CachedLauncher(_kernel)
