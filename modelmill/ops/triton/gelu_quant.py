"""GELU to 8 bits: a row in registers, read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import INTERPRETED, as_rows
from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.gelu import gelu_value
from modelmill.ops.triton.layer_norm_quant import split_width, supports_rows
from modelmill.ops.triton.pdl import pdl_launch_options, pdl_wait
from modelmill.ops.triton.quantize_rows import round_8bit, row_inv_scale


def supports(x: torch.Tensor, dtype: torch.dtype, inv_scale: torch.Tensor | None = None) -> bool:
    """Rows up to 16,384 wide, a device that knows the type, one static factor or none."""
    return supports_rows(x, dtype, inv_scale)


def run(
    x: torch.Tensor,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None = None,
    *,
    launch_config: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference. launch_config: rows a program, warps."""
    flat = as_rows(x)
    rows, width = flat.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = (
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        if inv_scale is None
        else None
    )
    main, rest = split_width(width)
    share, warps = launch_config or (1, max(1, min(16, main // 1024)))
    _kernel[(-(-rows // share),)](
        flat, values, values if scale is None else scale,
        values if inv_scale is None else inv_scale,
        rows, width, flat.stride(0), WHOLE=dtype is torch.int8, TOKEN=inv_scale is None,
        ROUGH=x.dtype.itemsize == 2, ASSEMBLY=not INTERPRETED,
        ROWS=share, MAIN=main, REST=rest, num_warps=warps, **pdl_launch_options(x.device, rows),
    )  # fmt: skip
    return values, scale


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, values_ptr, scales_ptr, factor_ptr, rows, width, stride,
    WHOLE: tl.constexpr, TOKEN: tl.constexpr, ROUGH: tl.constexpr, ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, spare = tl.arange(0, MAIN), MAIN + tl.arange(0, max(REST, 16))
    there = row < rows
    pdl_wait(PDL)
    y = _load_gelu(x_ptr + row * stride, there, column, width, ROUGH, ASSEMBLY)
    beyond = y
    if REST:
        beyond = _load_gelu(x_ptr + row * stride, there, spare, width, ROUGH, ASSEMBLY)
    if TOKEN:
        amax = tl.max(tl.abs(y), axis=1)
        if REST:
            amax = tl.maximum(amax, tl.max(tl.abs(beyond), axis=1))
        factor = row_inv_scale(amax, scales_ptr + row, there, WHOLE)[:, None]
    else:
        factor = tl.load(factor_ptr)
    target = values_ptr + row * width
    kept: tl.constexpr = values_ptr.dtype.element_ty
    y = round_8bit(y, factor, WHOLE, TOKEN).to(kept)
    tl.store(target[:, None] + column, y, mask=there[:, None] & (column < width))
    if REST:
        beyond = round_8bit(beyond, factor, WHOLE, TOKEN).to(kept)
        tl.store(target[:, None] + spare, beyond, mask=there[:, None] & (spare < width))


@triton.jit
def _load_gelu(at, there, column, width, ROUGH: tl.constexpr, ASSEMBLY: tl.constexpr):
    """GELU of a part of the rows, rounded to x's dtype as the two ops one after the other would, in
    float32.
    """
    x = tl.load(at[:, None] + column, mask=there[:, None] & (column < width), other=0.0)
    return gelu_value(x.to(tl.float32), ROUGH, ASSEMBLY).to(x.dtype).to(tl.float32)
