"""GELU to 8 bits: a row in registers, read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import multiprocessors, power_of_two, rows_of
from modelmill.ops.triton.early import enter, launch
from modelmill.ops.triton.gelu import bent
from modelmill.ops.triton.layer_norms import fits
from modelmill.ops.triton.row8 import rounded8


def supports(x: torch.Tensor, kind: torch.dtype, factor: torch.Tensor | None = None) -> bool:
    """Rows up to 16,384 wide, a device that knows the type, one static factor or none."""
    return fits(x, kind, factor)


def run(
    x: torch.Tensor, kind: torch.dtype, factor: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference."""
    flat = rows_of(x)
    rows, width = flat.shape
    values = torch.empty(x.shape, dtype=kind, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if factor is None else None
    block = power_of_two(width)
    share = max(1, rows // (8 * multiprocessors(x.device)))
    _kernel[(triton.cdiv(rows, share),)](
        flat, values, values if scale is None else scale, values if factor is None else factor,
        rows, width, flat.stride(0), share, WHOLE=kind is torch.int8, TOKEN=factor is None,
        BLOCK=block, STAGES=2 if share > 1 else 1, num_warps=max(1, min(16, block // 1024)), **launch(x.device, rows),
    )  # fmt: skip
    return values, scale


@triton.jit(do_not_specialize=["rows", "share"])
def _kernel(
    x_ptr, values_ptr, scales_ptr, factor_ptr, rows, width, stride, share,
    WHOLE: tl.constexpr, TOKEN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = 1.0
    if not TOKEN:
        factor = tl.load(factor_ptr)
    enter(EARLY)
    first = tl.program_id(0).to(tl.int64) * share
    for row in tl.range(first, tl.minimum(first + share, rows), num_stages=STAGES):
        x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
        # rounded to x's dtype first, as the two ops one after the other would
        y = bent(x.to(tl.float32)).to(x.dtype).to(tl.float32)
        y = rounded8(y, scales_ptr + row, factor, WHOLE, TOKEN)
        tl.store(values_ptr + row * width + column, y.to(values_ptr.dtype.element_ty), mask=inside)
