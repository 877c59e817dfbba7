"""LayerNorm with a residual, an 8-bit output, or both: rows in registers, read and written once.

Computes: LayerNorm of x[M, N] (+ residual), in x's dtype or rounded to 8 bits with one static
    factor or a dynamic scale per row
Dtypes: bfloat16, float16 or float32; values int8 or e4m3; float32 scales
Layout: rows
Range: any M; N ≤ 16,384
Technique: whole rows in registers, split in two powers of two, PDL
Ops: add_layer_norm, add_layer_norm_quant

A row of 1,280 values is held as 1,024 and 256 values: if it were padded to a power of two, a third
of the work would be wasted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.triton.common.device import as_rows, next_power_of_two
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.norm_quantize.output_dtype_support import supports_output_dtype
from modelmill.ops.triton.norm_quantize.quantize_rows import (
    scale_and_round_8bit,
    store_scales_and_invert,
)

MAX_WIDTH = 16384


SUPPORTED_PROBLEMS = (
    RowOpSupportRange(
        max_width=MAX_WIDTH, max_factors=1, packed_dtypes=True, fits=supports_output_dtype
    ),
)


def split_width_to_powers_of_two(width: int) -> tuple[int, int]:
    """Split a row into two powers of two that hold it.

    Examples: 1,280 → (1,024, 256), 768 → (512, 256), 1,024 → (1,024, 0).
    """
    padded = next_power_of_two(width)
    if width == padded or padded <= 16:
        return padded, 0
    rest = next_power_of_two(width - padded // 2)
    return (padded // 2, rest) if rest < padded // 2 else (padded, 0)


def layer_norm_quant(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None, inv_scale: torch.Tensor | None = None,
    launch_config: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """Normalize x or x + residual, and optionally quantize.

    launch_config: (rows per program, warps).

    Returns:
        (normalized, or values of ``dtype``; their scales or None; the sum, or x).
    """
    flat, flat_residual = as_rows(x), as_rows(x if residual is None else residual)
    rows, width = flat.shape
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    token = dtype is not None and inv_scale is None
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if token else None
    main, rest = split_width_to_powers_of_two(width)
    rows_per_program, warps = launch_config or (1, max(1, min(16, main // 1024)))
    _layer_norm_kernel[(-(-rows // rows_per_program),)](
        flat, flat_residual, weight, bias, out, out if scale is None else scale, total,
        weight if inv_scale is None else inv_scale,
        rows, width, flat.stride(0), flat_residual.stride(0), eps,
        ADD=residual is not None, KIND=0 if dtype is None else 1 if dtype is torch.int8 else 2,
        TOKEN=token,
        ROWS=rows_per_program, MAIN=main, REST=rest, num_warps=warps,
        **pdl_launch_options(x.device, rows),
    )  # fmt: skip
    return out, scale, total


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, scales_ptr, total_ptr, factor_ptr,
    rows, width, x_stride, residual_stride, eps,
    ADD: tl.constexpr, KIND: tl.constexpr, TOKEN: tl.constexpr,
    ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, rest_column = tl.arange(0, MAIN), MAIN + tl.arange(0, max(REST, 16))
    pdl_wait_and_trigger(PDL)
    x_at, residual_at, total_at = (
        x_ptr + row * x_stride,
        residual_ptr + row * residual_stride,
        total_ptr + row * width,
    )
    row_valid = row < rows
    x = _load_part_and_add_residual(x_at, residual_at, total_at, row_valid, column, width, ADD)
    total = tl.sum(x, axis=1)
    rest = x
    if REST:
        rest = _load_part_and_add_residual(
            x_at, residual_at, total_at, row_valid, rest_column, width, ADD
        )
        total += tl.sum(rest, axis=1)
    mean = (total / width)[:, None]
    x = tl.where((column < width)[None, :], x - mean, 0.0)
    square_sum = tl.sum(x * x, axis=1)
    if REST:
        rest = tl.where((rest_column < width)[None, :], rest - mean, 0.0)
        square_sum += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(square_sum / width + eps)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = _scale_and_shift_part(x, scale, weight_ptr, bias_ptr, column, width).to(dtype)
    if REST:
        rest = _scale_and_shift_part(rest, scale, weight_ptr, bias_ptr, rest_column, width).to(
            dtype
        )
    if KIND:
        x, rest = x.to(tl.float32), rest.to(tl.float32)
        if TOKEN:
            amax = tl.max(tl.abs(x), axis=1)
            if REST:
                amax = tl.maximum(amax, tl.max(tl.abs(rest), axis=1))
            factor = store_scales_and_invert(amax, scales_ptr + row, row_valid, KIND == 1)[:, None]
        else:
            factor = tl.load(factor_ptr)
        x = scale_and_round_8bit(x, factor, KIND == 1, TOKEN)
        if REST:
            rest = scale_and_round_8bit(rest, factor, KIND == 1, TOKEN)
    out_at = out_ptr + row * width
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_at[:, None] + column, x.to(out_dtype), mask=row_valid[:, None] & (column < width))
    if REST:
        tl.store(
            out_at[:, None] + rest_column,
            rest.to(out_dtype),
            mask=row_valid[:, None] & (rest_column < width),
        )


@triton.jit
def _load_part_and_add_residual(
    x_at, residual_at, total_at, row_valid, column, width, ADD: tl.constexpr
):
    """Load part of the rows as float32, with the residual added if there is one."""
    inside = row_valid[:, None] & (column < width)
    x = tl.load(x_at[:, None] + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_at[:, None] + column, mask=inside, other=0.0)
        # rounded to x's dtype before the statistics, as two separate ops would do
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_at[:, None] + column, x, mask=inside)
    return x.to(tl.float32)


@triton.jit
def _scale_and_shift_part(centered, scale, weight_ptr, bias_ptr, column, width):
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    return centered * scale * weight[None, :] + bias[None, :]
