"""Quantization to 8 bits after RMSNorm (with or without residual add) or without a norm.

Computes: quantize(rmsnorm(x[M, N] (+ residual)))[:, perm], the norm, the residual and the
    permutation optional
Dtypes: bfloat16, float16 or float32; values int8 or e4m3; float32 scales, int32 zero-points
Layout: rows; perm, factors and zero-points [columns]
Range: any M; N ≤ 16,384 (quantize: any M, N ≤ 32,768)
Technique: whole rows in registers, cached launcher, PDL
Ops: quantize, rms_norm_quant, add_rms_norm_quant

A row is held in registers, read and written once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.row_op_support import RowOpProblem, RowOpSupportRange, has_contiguous_tensors
from modelmill.ops.triton.common.device import (
    as_rows,
    max_shared_bytes,
    next_power_of_two,
    sm_count,
)
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.norm_quantize.output_dtype_support import (
    supports_output_and_wide_input_dtype,
    supports_output_dtype,
)

MAX_WIDTH = 16384
_MIN_AMAX = tl.constexpr(1e-6)
_ROUNDING_MAGIC_NUMBER = tl.constexpr(12582912.0)  # 1.5 · 2²³


def _supports_permute_and_dtype(problem: RowOpProblem) -> bool:
    """Whether shared memory also holds the rows that are permuted; the norm's are narrower."""
    permuted = problem.spec is not None and problem.spec.perm is not None
    if permuted and _permutation_shared_bytes(problem.width) > max_shared_bytes(problem.device):
        return False
    return supports_output_and_wide_input_dtype(problem)


def _permutation_shared_bytes(width: int) -> int:
    """Shared memory in which a row is permuted, in float32."""
    return 4 * next_power_of_two(width)


_NORM_QUANT_RANGE = RowOpSupportRange(
    same_dtype=True, max_width=MAX_WIDTH, packed_dtypes=True, fits=supports_output_dtype
)
SUPPORTED_PROBLEMS = (_NORM_QUANT_RANGE,)
QUANTIZE_PROBLEMS = (
    replace(_NORM_QUANT_RANGE, max_width=2 * MAX_WIDTH, fits=_supports_permute_and_dtype),
)


def supports(*args: Any) -> bool:
    """Whether factors, zero-points and permutation of the spec, which is last, are contiguous."""
    return has_contiguous_tensors(args[-1])


class NormQuantLaunch(NamedTuple):
    """Launch parameters and the constexprs that depend on them."""

    programs: int
    rows_per_program: int
    quant_max: float
    blocks: tuple[int, int]
    stages: int
    pdl: int
    options: Mapping[str, Any]


@functools.lru_cache(4096)
def _plan_launch(
    rows: int,
    width: int,
    columns: int,
    row_bytes: int,
    per_column: bool,
    permuted: bool,
    dtype: torch.dtype,
    bits: int,
    device: torch.device,
) -> NormQuantLaunch:
    """Plan a launch.

    row_bytes: that the kernel reads per column of a row; per_column: whether it reads scales,
    zero-points or a permutation per column; permuted: a permutation.
    """
    quant_max = 448.0 if dtype is not torch.int8 else float(2 ** (bits - 1) - 1)
    blocks = next_power_of_two(width), next_power_of_two(columns)
    # Per-column values are read once for several rows; the next row is loaded while one is rounded.
    rows_per_slot = rows // (4 * sm_count(device))
    rows_per_program = max(1, rows_per_slot) if per_column else 1
    # With many rows a thread holds 32 values of a row; with per-column values, 8.
    warps = max(blocks) // (256 if rows_per_program > 1 else 1024 if rows_per_slot else 512)
    pdl = pdl_launch_options(device, rows)
    options = {"num_warps": max(1, min(16, warps)), "launch_pdl": pdl["launch_pdl"]}
    return NormQuantLaunch(
        -(-rows // rows_per_program),
        rows_per_program,
        quant_max,
        blocks,
        _num_stages(blocks[0], row_bytes, permuted, device) if rows_per_program > 1 else 1,
        pdl["PDL"],
        options,
    )


def _num_stages(block: int, row_bytes: int, permuted: bool, device: torch.device) -> int:
    """Stages of the loop over rows: up to 3, so many that shared memory holds the loaded rows."""
    free = max_shared_bytes(device) - (_permutation_shared_bytes(block) if permuted else 0)
    return max(1, min(3, 1 + free // (block * row_bytes)))


def rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    spec: ActQuantSpec,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Quantize rms_norm of x or x + residual; weight None: no norm.

    The sum overwrites ``residual`` if that is contiguous.

    Returns:
        (values, scale or None, the sum or x).
    """
    dtype, factor, zero, perm, bits = spec
    flat, flat_residual = as_rows(x), as_rows(x if residual is None else residual)
    rows, width = flat.shape
    device = x.device
    columns = width if perm is None else perm.numel()
    values = torch.empty((rows, columns), dtype=dtype, device=device)
    scale = (
        None
        if factor is not None
        else torch.empty(x.shape[:-1], dtype=torch.float32, device=device)
    )
    total = x
    if residual is not None:
        total = (
            residual
            if residual.is_contiguous()
            else torch.empty(x.shape, dtype=x.dtype, device=device)
        )
    has_column_scales = factor is not None and factor.numel() > 1
    plan = _plan_launch(
        rows, width, columns, x.element_size() * (1 if residual is None else 2),
        has_column_scales or perm is not None, perm is not None, dtype, bits, device,
    )  # fmt: skip
    strides = (flat.stride(0), flat_residual.stride(0))
    _launcher(
        (plan.programs, 1, 1),
        (
            flat, flat_residual, flat if weight is None else weight, values,
            flat if scale is None else scale, total,
            flat if factor is None else factor, flat if zero is None else zero,
            flat if perm is None else perm,
        ),
        (rows, width, columns, *strides, eps, plan.rows_per_program),
        (width, columns, *strides),
        (
            weight is not None, residual is not None, factor is None, has_column_scales,
            zero is not None,
            perm is not None,
            dtype is torch.int8, plan.quant_max, *plan.blocks, plan.stages, plan.pdl,
        ),
        plan.options,
    )  # fmt: skip
    return values if x.dim() == 2 else values.view(*x.shape[:-1], columns), scale, total


@triton.jit(do_not_specialize=["rows", "share"])
def _rms_norm_quant_kernel(
    x_ptr, residual_ptr, weight_ptr, values_ptr, scales_ptr, total_ptr, factor_ptr, zero_ptr,
    order_ptr,
    rows, width, columns, x_stride, residual_stride, eps, share,
    NORM: tl.constexpr, ADD: tl.constexpr, DYNAMIC: tl.constexpr, COLUMN_SCALES: tl.constexpr,
    SHIFT: tl.constexpr,
    ORDER: tl.constexpr, IS_INT8: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column, n = tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    weight = 1.0
    if NORM:
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    order, factor, zero = n, 1.0, n
    if ORDER:
        order = tl.load(order_ptr + n, mask=n < columns, other=-1)
    if COLUMN_SCALES:
        factor = tl.load(factor_ptr + n, mask=n < columns, other=0.0)
    elif not DYNAMIC:
        factor = tl.load(factor_ptr)
    if SHIFT:
        zero = tl.load(zero_ptr + n, mask=n < columns, other=0).to(tl.float32)
    if ORDER and COLUMN_SCALES:
        factor = tl.where(order >= 0, factor, 0.0)
    if ORDER and SHIFT:
        zero = tl.where(order >= 0, zero, 0.0)
    pdl_wait_and_trigger(PDL)
    first = tl.program_id(0).to(tl.int64) * share
    for row in tl.range(first, tl.minimum(first + share, rows), num_stages=STAGES):
        x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0)
        if ADD:
            residual = tl.load(
                residual_ptr + row * residual_stride + column, mask=column < width, other=0.0
            )
            # Rounded to the residual's dtype before the statistics, as two separate ops would do.
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
            tl.store(total_ptr + row * width + column, x, mask=column < width)
        y = x.to(tl.float32)
        if NORM:
            inv_rms = tl.rsqrt(tl.sum(y * y, axis=0) / width + eps)
            y = ((y * inv_rms).to(x.dtype).to(tl.float32) * weight).to(x.dtype).to(tl.float32)
        if DYNAMIC:
            amax = tl.maximum(tl.max(tl.abs(y), axis=0), _MIN_AMAX)
            quant_max = amax * 0.0 + MOST
            row_factor = tl.div_rn(quant_max, amax)
            tl.store(scales_ptr + row, tl.div_rn(amax, quant_max))
        else:
            row_factor = factor
        if ORDER:
            y = tl.gather(y, tl.maximum(order, 0), 0)
        y *= row_factor
        if ORDER and not COLUMN_SCALES:
            y = tl.where(order >= 0, y, 0.0)
        if IS_INT8:
            # From 2²³ to 2²⁴ float32 represents exactly the integers: adding 1.5 · 2²³ rounds half
            # to even, and the last byte of the bits is the int8.
            y += _ROUNDING_MAGIC_NUMBER
            if SHIFT:
                y += zero
            if not DYNAMIC:
                y = tl.minimum(
                    tl.maximum(y, _ROUNDING_MAGIC_NUMBER - MOST - SHIFT),
                    _ROUNDING_MAGIC_NUMBER + MOST,
                )
            out = y.to(tl.int32, bitcast=True)
        else:
            out = y if DYNAMIC else tl.minimum(tl.maximum(y, -MOST), MOST)
        tl.store(
            values_ptr + row * columns + n, out.to(values_ptr.dtype.element_ty), mask=n < columns
        )


_launcher = CachedLauncher(_rms_norm_quant_kernel)
