"""Dequantize 8-bit weights to x's dtype, for products with so many rows that cuBLAS is fastest.

Computes: weight[N, K] in x's dtype from int8 codes, scales and offsets
Dtypes: int8 to bfloat16, float16 or float32
Layout: row-major; scales and offsets [N, groups]
Range: any N and K
Technique: elementwise, cached launcher
Used by: groupwise.py, int4_linear.py, int8_group_linear.py, int8_linear.py, mxfp4_linear.py

Each weight is rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.triton.common.fast_launch import CachedLauncher

_MIN_GROUP_COLUMNS = 32  # columns that share a scale, at least
_BLOCK_N, _PACKS_PER_PROGRAM = 2, 64  # per program


def dequantize(inputs: GroupwiseLinearInputs) -> torch.Tensor:
    """The weight of a product: scale · code + offset as [N, K] of x's dtype.

    A group may also be all columns, with scales [N].
    """
    (n, columns), group = (len(inputs.weight), inputs.x.shape[1]), inputs.group
    programs = (-(-n // _BLOCK_N), -(-columns // (_MIN_GROUP_COLUMNS * _PACKS_PER_PROGRAM)), 1)
    group = group if group < columns else 1 << 30
    constants = (group, _MIN_GROUP_COLUMNS, _BLOCK_N, _PACKS_PER_PROGRAM)
    return launch_dequantize(_launcher, programs, inputs, (), constants, warps=4)


def launch_dequantize_nibbles(
    launcher: CachedLauncher, inputs: GroupwiseLinearInputs, constants: tuple[int, ...]
) -> torch.Tensor:
    """``launch_dequantize`` of 4-bit codes, sixteen bytes of which have 32 columns."""
    n, width = inputs.weight.shape
    rows, runs = 2, 64
    programs = (-(-n // rows), -(-width // (16 * runs)), 1)
    constants = (*constants, rows, runs)
    return launch_dequantize(launcher, programs, inputs, (width,), constants, warps=2)


def launch_dequantize(
    launcher: CachedLauncher,
    programs: tuple[int, int, int],
    inputs: GroupwiseLinearInputs,
    sizes: tuple[int, ...],
    constants: tuple[int, ...],
    *,
    warps: int,
) -> torch.Tensor:
    """Dequantize to [N, K] of x's dtype.

    Args:
        launcher: of a kernel of weight, scale, offset, out; N, K, ``sizes``, strides of weight and
            scale; whether there is an offset, and ``constants``.
        programs: the grid.
        inputs: of the product.
        sizes: further sizes.
        constants: further constexprs.
        warps: of a program.
    """
    x, weight, scale, offset = inputs[:4]
    n, columns = weight.shape[0], x.shape[1]
    out = torch.empty((n, columns), dtype=x.dtype, device=weight.device)
    numbers = (n, columns, *sizes, weight.stride(0), scale.stride(0))
    tensors = (weight, scale, scale if offset is None else offset, out)
    constexprs = (offset is not None, *constants)
    launcher(programs, tensors, numbers, numbers, constexprs, {"num_warps": warps})
    return out


def multiply_dequantized(inputs: GroupwiseLinearInputs, weight: torch.Tensor) -> torch.Tensor:
    """Compute x [T, K] · weight [N, K]ᵀ + bias [N] with cuBLAS: [T, N] of x's dtype.

    Args:
        inputs: x, and the bias, which may have another dtype.
        weight: the dequantized one.
    """
    x, bias = inputs.x, inputs.bias
    if bias is None or bias.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return (F.linear(x, weight) + bias).to(x.dtype)


@triton.jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, offset_ptr, out_ptr, n, k, stride, grid_stride,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    in_range = (row < n)[:, None] & (run * RUN < k)[None, :]
    column = run[None, :, None] * RUN + tl.arange(0, RUN)[None, None, :]
    inside = in_range[:, :, None] & (column < k)
    codes = tl.load(weight_ptr + row[:, None, None] * stride + column, mask=inside, other=0)
    grid = row[:, None] * grid_stride + (run * RUN // GROUP)[None, :]
    scale = tl.load(scale_ptr + grid, mask=in_range, other=0.0).to(tl.float32)
    value = codes.to(tl.float32) * scale[:, :, None]
    if OFFSET:
        value += tl.load(offset_ptr + grid, mask=in_range, other=0.0).to(tl.float32)[:, :, None]
    tl.store(
        out_ptr + row[:, None, None] * k + column, value.to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def store_product(out_ptr, total, bias_ptr, row, token, n, out_stride, live, BIAS: tl.constexpr):
    """Store total [N, T] (+ bias) as rows of out; live: [1, T] tokens that exist."""
    if BIAS:
        total += tl.load(bias_ptr + tl.minimum(row, n - 1)).to(tl.float32)[:, None]
    target = out_ptr + token.to(tl.int64)[None, :] * out_stride + row[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(row < n)[:, None] & live)


@triton.jit
def load_packed_nibbles(weight_ptr, n, width, stride, BLOCK_N: tl.constexpr, RUNS: tl.constexpr):
    """(rows [N], runs of 32 columns [R], which of them exist, the bytes [N, R, 16])."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    byte = tl.arange(0, 16)[None, None, :]
    in_range = (row < n)[:, None] & (run * 16 < width)[None, :]
    at = row[:, None, None] * stride + run[None, :, None] * 16 + byte
    codes = tl.load(weight_ptr + at, mask=in_range[:, :, None] & (byte < 16), other=0)
    return row, run, in_range, codes


@triton.jit
def store_nibbles(out_ptr, low, high, row, run, in_range, k):
    """Store the values of the low nibbles [N, R, 16], and of the high ones 16 columns further."""
    column = run[None, :, None] * 32 + tl.arange(0, 16)[None, None, :]
    target = out_ptr + row[:, None, None] * k + column
    inside = in_range[:, :, None] & (column < k)
    tl.store(target, low.to(out_ptr.dtype.element_ty), mask=inside)
    inside = in_range[:, :, None] & (column + 16 < k)
    tl.store(target + 16, high.to(out_ptr.dtype.element_ty), mask=inside)


_launcher = CachedLauncher(_dequantize_kernel)
