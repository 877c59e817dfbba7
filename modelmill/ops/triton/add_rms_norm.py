"""Residual add and RMSNorm: two reads and two writes a value, the sum stored over the residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import as_rows, row_launch
from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.fast_launch import CachedLauncher
from modelmill.ops.triton.pdl import pdl_launch_options, pdl_wait
from modelmill.ops.triton.rms_norm import MAX_WIDTH


def supports(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    """Rows up to 32,768 wide, all of one dtype and x and residual of one shape."""
    same = x.dtype == residual.dtype == weight.dtype and x.shape == residual.shape
    return same and x.shape[-1] <= MAX_WIDTH and x.numel() > 0


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; the sum is written over ``residual`` where that is contiguous."""
    flat, held = as_rows(x), as_rows(residual)
    rows, width = flat.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = residual if residual.is_contiguous() else torch.empty_like(out).view(x.shape)
    share, block, warps = row_launch(flat)
    early, fixed = pdl_launch_options(x.device, rows), (width, flat.stride(0), held.stride(0))
    _launcher(
        (-(-rows // share), 1, 1),
        (flat, held, weight, out, total),
        (rows, *fixed, eps),
        fixed,
        (share, block, early["PDL"]),
        {"num_warps": warps, "launch_pdl": early["launch_pdl"]},
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
    held = tl.load(
        residual_ptr + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0
    )
    # Rounded to the stream's dtype before the statistics, as the unfused pair of ops would.
    total = (x.to(tl.float32) + held.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row[:, None] * width + column[None, :], total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    normal = (wide * scale[:, None]).to(x.dtype).to(tl.float32)
    out = normal * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * width + column[None, :], out.to(x.dtype), mask=inside)


_launcher = CachedLauncher(_kernel)
