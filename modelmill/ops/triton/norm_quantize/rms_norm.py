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

from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.triton.common.device import as_rows, plan_row_launch
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_WIDTH = 32768
SUPPORTED_PROBLEMS = (RowOpSupportRange(max_width=MAX_WIDTH, same_dtype=True),)


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Run the op: statistics in float32, cast, then the weight."""
    flat = as_rows(x)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    launch_row_kernel(_launcher, (flat, weight, out), (flat.stride(0),), eps)
    return out.view(x.shape)


def launch_row_kernel(
    launcher: CachedLauncher,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    eps: float,
) -> None:
    """Launch a kernel of tensors, rows, width, ``strides`` and eps on the rows of the first."""
    flat = tensors[0]
    rows, width = flat.shape
    rows_per_program, block, warps = plan_row_launch(flat)
    pdl, fixed = pdl_launch_options(flat.device, rows), (width, *strides)
    launcher(
        (-(-rows // rows_per_program), 1, 1),
        tensors,
        (rows, *fixed, eps),
        fixed,
        (rows_per_program, block, pdl["PDL"]),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, weight_ptr, out_ptr, rows, width, stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, column, inside, weight = load_row_indices_and_weight(weight_ptr, rows, width, ROWS, BLOCK)
    pdl_wait_and_trigger(PDL)
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    out = rms_normalize(x, weight, width, eps)
    tl.store(out_ptr + row[:, None] * width + column[None, :], out, mask=inside)


@triton.jit
def load_row_indices_and_weight(weight_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(rows [ROWS] and columns [BLOCK] of a program, which of them exist, the weight)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return row, column, inside, tl.load(weight_ptr + column, mask=column < width, other=0.0)


@triton.jit
def rms_normalize(x, weight, width, eps):
    """Whole rows x [ROWS, BLOCK] over their root mean square, rounded, then times the weight."""
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / width + eps)
    normal = (x32 * scale[:, None]).to(x.dtype).to(tl.float32)
    return (normal * weight.to(tl.float32)[None, :]).to(x.dtype)


_launcher = CachedLauncher(_kernel)
