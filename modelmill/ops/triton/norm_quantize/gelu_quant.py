"""GELU with an 8-bit output: a row is held in registers, read and written once.

Computes: values[M, N] = quantize(gelu(x[M, N])), one static factor or a dynamic scale per row
Dtypes: x bfloat16, float16 or float32; values int8 or e4m3; float32 scales
Layout: rows
Range: any M; N ≤ 16,384
Technique: whole rows in registers, PDL
Ops: gelu_quant
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.common.device import INTERPRETED, as_rows
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.norm_quantize.gelu import gelu_value
from modelmill.ops.triton.norm_quantize.layer_norm_quant import (
    SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS,
)
from modelmill.ops.triton.norm_quantize.layer_norm_quant import split_width_to_powers_of_two
from modelmill.ops.triton.norm_quantize.quantize_rows import (
    scale_and_round_8bit,
    store_scales_and_invert,
)


def run(
    x: torch.Tensor,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None = None,
    *,
    launch_config: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the op.

    launch_config: (rows per program, warps).
    """
    flat = as_rows(x)
    rows, width = flat.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = (
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        if inv_scale is None
        else None
    )
    main, rest = split_width_to_powers_of_two(width)
    share, warps = launch_config or (1, max(1, min(16, main // 1024)))
    _kernel[(-(-rows // share),)](
        flat, values, values if scale is None else scale,
        values if inv_scale is None else inv_scale,
        rows, width, flat.stride(0), IS_INT8=dtype is torch.int8, TOKEN=inv_scale is None,
        APPROXIMATE=x.dtype.itemsize == 2, ASSEMBLY=not INTERPRETED,
        ROWS=share, MAIN=main, REST=rest, num_warps=warps, **pdl_launch_options(x.device, rows),
    )  # fmt: skip
    return values, scale


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, values_ptr, scales_ptr, factor_ptr, rows, width, stride,
    IS_INT8: tl.constexpr, TOKEN: tl.constexpr, APPROXIMATE: tl.constexpr, ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, rest_column = tl.arange(0, MAIN), MAIN + tl.arange(0, max(REST, 16))
    row_valid = row < rows
    pdl_wait_and_trigger(PDL)
    y = _load_gelu(x_ptr + row * stride, row_valid, column, width, APPROXIMATE, ASSEMBLY)
    rest = y
    if REST:
        rest = _load_gelu(
            x_ptr + row * stride, row_valid, rest_column, width, APPROXIMATE, ASSEMBLY
        )
    if TOKEN:
        amax = tl.max(tl.abs(y), axis=1)
        if REST:
            amax = tl.maximum(amax, tl.max(tl.abs(rest), axis=1))
        factor = store_scales_and_invert(amax, scales_ptr + row, row_valid, IS_INT8)[:, None]
    else:
        factor = tl.load(factor_ptr)
    target = values_ptr + row * width
    out_dtype: tl.constexpr = values_ptr.dtype.element_ty
    y = scale_and_round_8bit(y, factor, IS_INT8, TOKEN).to(out_dtype)
    tl.store(target[:, None] + column, y, mask=row_valid[:, None] & (column < width))
    if REST:
        rest = scale_and_round_8bit(rest, factor, IS_INT8, TOKEN).to(out_dtype)
        tl.store(
            target[:, None] + rest_column, rest, mask=row_valid[:, None] & (rest_column < width)
        )


@triton.jit
def _load_gelu(at, row_valid, column, width, APPROXIMATE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """GELU of a part of the rows, rounded to x's dtype as two separate ops would do, as float32."""
    x = tl.load(at[:, None] + column, mask=row_valid[:, None] & (column < width), other=0.0)
    return gelu_value(x.to(tl.float32), APPROXIMATE, ASSEMBLY).to(x.dtype).to(tl.float32)
