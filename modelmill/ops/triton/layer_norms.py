"""LayerNorm with a residual, with an 8-bit output, or both: rows in registers, read and written once.

A program takes several rows, so that weight and bias are read once for all of them; the next row is on its way while
one is normalised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import knows_fp8, multiprocessors, power_of_two, rows_of
from modelmill.ops.triton.early import enter, launch
from modelmill.ops.triton.row8 import rounded8

WIDEST = 16384


def fits(x: torch.Tensor, kind: torch.dtype | None = None, factor: torch.Tensor | None = None) -> bool:
    """Rows up to 16,384 wide, and a device that knows the type; one static factor, float32, or none."""
    known = kind in (None, torch.int8) or knows_fp8(x.device)
    one = factor is None or (factor.numel() == 1 and factor.dtype is torch.float32)
    return known and one and 0 < x.shape[-1] <= WIDEST and x.numel() > 0


def norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    kind: torch.dtype | None = None, factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(normed, or values of ``kind``; their scales or None; the sum, or x)."""
    flat, held = rows_of(x), rows_of(x if residual is None else residual)
    rows, width = flat.shape
    out = torch.empty(x.shape, dtype=kind or x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    token = kind is not None and factor is None
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if token else None
    block = power_of_two(width)
    share = max(1, rows // (8 * multiprocessors(x.device)))
    _norm[(triton.cdiv(rows, share),)](
        flat, held, weight, bias, out, out if scale is None else scale, total, weight if factor is None else factor,
        rows, width, flat.stride(0), held.stride(0), eps, share,
        ADD=residual is not None, KIND=0 if kind is None else 1 if kind is torch.int8 else 2, TOKEN=token,
        BLOCK=block, STAGES=2 if share > 1 else 1, num_warps=max(1, min(16, block // 512)), **launch(x.device, rows),
    )  # fmt: skip
    return out, scale, total


@triton.jit(do_not_specialize=["rows", "share"])
def _norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, scales_ptr, total_ptr, factor_ptr,
    rows, width, x_stride, residual_stride, eps, share,
    ADD: tl.constexpr, KIND: tl.constexpr, TOKEN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if KIND and not TOKEN:
        factor = tl.load(factor_ptr)
    enter(EARLY)
    first = tl.program_id(0).to(tl.int64) * share
    for row in tl.range(first, tl.minimum(first + share, rows), num_stages=STAGES):
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
        if ADD:
            held = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
            # rounded to the stream's dtype before the statistics, as the unfused pair of ops would
            x = (x.to(tl.float32) + held.to(tl.float32)).to(x.dtype)
            tl.store(total_ptr + row * width + column, x, mask=inside)
        wide = x.to(tl.float32)
        away = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
        y = away * tl.rsqrt(tl.sum(away * away, axis=0) / width + eps) * weight + bias
        y = y.to(x.dtype)
        if KIND:
            y = rounded8(y.to(tl.float32), scales_ptr + row, factor, KIND == 1, TOKEN)
        tl.store(out_ptr + row * width + column, y.to(out_ptr.dtype.element_ty), mask=inside)
