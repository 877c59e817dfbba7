"""A scaled branch, or the sum of two, added to the residual, and RMSNorm of the sum.

Computes: residual[M, N] += (x[M, N] + other[M, N]) · factor; out[M, N] = rmsnorm(residual) ·
    weight[N]
Dtypes: bfloat16, float16 or float32; float32 arithmetic
Layout: contiguous rows
Range: any M; N ≤ 32,768
Technique: whole rows in registers, cached launcher, PDL
Ops: branches_add_rms_norm
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.branches_add_rms_norm import BranchesAddRMSNormInputs
from modelmill.ops.kernel_support import HALF_AND_FLOAT32_DTYPES
from modelmill.ops.triton.common.device import plan_row_launch
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.norm_quantize.rms_norm import (
    MAX_WIDTH,
    load_row_indices_and_weight,
    rms_normalize,
)


def supports(inputs: BranchesAddRMSNormInputs) -> bool:
    """Contiguous rows of one dtype."""
    x, other, _, residual, weight, _ = inputs
    tensors = [x, residual, weight] if other is None else [x, residual, weight, other]
    return (
        x.numel() > 0
        and x.shape == residual.shape
        and x.shape[1] <= MAX_WIDTH
        and x.dtype in HALF_AND_FLOAT32_DTYPES
        and all(each.dtype is x.dtype and each.is_contiguous() for each in tensors)
    )


def run(inputs: BranchesAddRMSNormInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op; the sum overwrites the residual."""
    x, other, factor, residual, weight, eps = inputs
    rows, width = x.shape
    out = torch.empty_like(x)
    rows_per_program, block, warps = plan_row_launch(x)
    pdl = pdl_launch_options(x.device, rows)
    _launcher(
        (-(-rows // rows_per_program), 1, 1),
        (x, x if other is None else other, residual, weight, out),
        (rows, width, factor, eps),
        (width,),
        (other is not None, factor != 1.0, rows_per_program, block, pdl["PDL"]),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )
    return out, residual


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, other_ptr, residual_ptr, weight_ptr, out_ptr, rows, width, factor, eps,
    TWO: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, column, inside, weight = load_row_indices_and_weight(weight_ptr, rows, width, ROWS, BLOCK)
    at = row[:, None] * width + column[None, :]
    pdl_wait_and_trigger(PDL)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    # rounded to x's dtype after each step, as single ops would do
    if TWO:
        other = tl.load(other_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
    if SCALES:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(residual_ptr + at, total, mask=inside)
    tl.store(out_ptr + at, rms_normalize(total, weight, width, eps), mask=inside)


_launcher = CachedLauncher(_kernel)
