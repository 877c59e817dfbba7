"""Products with MXFP4 weights: values in x's dtype, which holds them exactly, on tensor cores.

Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ (+ bias[N])
Dtypes: x and out bfloat16 or (M ≤ 16) float32; packed e2m1 codes; e8m0 scales
Layout: row-major; codes as in ops/int4_linear.py; scales [N, K / 32]
Range: M ≤ 64 (more rows: dequantized for cuBLAS)
Technique: codes to floats by shifts, scaled in registers, tensor cores with the weight as left
    operand, PDL
Ops: mxfp4_linear

A weight has two significant bits, so that its product with a power of two is exact in bfloat16. In
float16 it may be out of range: there the torch reference computes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from modelmill.ops.binding import run_first
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.mxfp4_linear import BLOCK_COLUMNS, DECLARATION
from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait
from modelmill.ops.triton.weight_only_gemm import groupwise
from modelmill.ops.triton.weight_only_gemm.dequant import launch_dequantize
from modelmill.ops.triton.weight_only_gemm.groupwise import supports as supports

DTYPES = (torch.bfloat16, torch.float32)
CHUNK = 128  # columns of a step
# (maximum rows of x, tokens per program, weight rows per program, stages, warps)
LAUNCH_CONFIGS = ((16, 16, 16, 6, 4), (32, 32, 64, 4, 4), (64, 64, 64, 4, 4))
MAX_ROWS = LAUNCH_CONFIGS[-1][0]


def _served(problem: object) -> bool:
    return (
        getattr(problem, "dtype", None) in DTYPES and getattr(problem, "group", 0) == BLOCK_COLUMNS
    )


SUPPORTED_PROBLEMS = tuple(
    replace(each, dtypes=tuple(t for t in each.dtypes if t in DTYPES), fits=_served)
    for each in groupwise.SUPPORTED_PROBLEMS
)


def _gemm(inputs: GroupwiseLinearInputs) -> torch.Tensor:
    """The product of a few rows; sums in float32."""
    x, weight, scale, _, _, bias = inputs
    tokens, k = x.shape
    n = weight.shape[0]
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    block_t, block_n, stages, warps = next(
        config[1:] for config in LAUNCH_CONFIGS if tokens <= config[0]
    )
    _mxfp4_gemm_kernel[(-(-n // block_n),)](
        x, weight, scale, x if bias is None else bias, out,
        tokens, n, k, weight.shape[1], x.stride(0), weight.stride(0), scale.stride(0),
        BIAS=bias is not None, CHUNK=CHUNK, BLOCK_T=block_t, BLOCK_N=block_n, num_stages=stages,
        num_warps=warps,
        **pdl_launch_options(x.device, tokens),
    )  # fmt: skip
    return out


def dequantize_weight(inputs: GroupwiseLinearInputs) -> torch.Tensor:
    """The weight of a product as [N, K] of x's dtype."""
    n, width = inputs.weight.shape
    rows, runs = 2, 64
    programs = (-(-n // rows), -(-width // (16 * runs)), 1)
    return launch_dequantize(_launcher, programs, inputs, (width,), (rows, runs), warps=2)


@triton.jit
def e2m1_values(codes):
    """Codes 0…15 as float32: twice a value is an integer, mantissa shifted by exponent − 1."""
    magnitude = (codes & 7).to(tl.int32)
    shifted = (2 + (magnitude & 1)) << tl.maximum((magnitude >> 1) - 1, 0)
    doubled = tl.where(magnitude < 2, magnitude, shifted)
    return tl.where(codes >= 8, -doubled, doubled).to(tl.float32) * 0.5


@triton.jit
def e8m0_values(codes):
    """Codes of scales as float32, 2^(code − 127); code 0 is below float32's normal numbers, 0."""
    values = (codes.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(codes == 255, float("nan"), values)


@triton.jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, offset_ptr, out_ptr, n, k, width, stride, grid_stride,
    OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    byte = tl.arange(0, 16)[None, None, :]
    in_range = (row < n)[:, None] & (run * 16 < width)[None, :]
    inside = in_range[:, :, None] & (byte < 16)
    at = row[:, None, None] * stride + run[None, :, None] * 16 + byte
    codes = tl.load(weight_ptr + at, mask=inside, other=0)
    grid = row[:, None] * grid_stride + run[None, :]
    scale = e8m0_values(tl.load(scale_ptr + grid, mask=in_range, other=0))[:, :, None]
    column = run[None, :, None] * 32 + byte
    target = out_ptr + row[:, None, None] * k + column
    low, high = e2m1_values(codes & 15) * scale, e2m1_values(codes >> 4) * scale
    tl.store(target, low.to(out_ptr.dtype.element_ty), mask=inside & (column < k))
    tl.store(target + 16, high.to(out_ptr.dtype.element_ty), mask=inside & (column + 16 < k))


_launcher = CachedLauncher(_dequantize_kernel)


@triton.jit(do_not_specialize=["tokens"])
def _mxfp4_gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, tokens, n, k, width, x_stride, stride,
    grid_stride,
    BIAS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last one; their results are not stored
    weight_row = tl.minimum(row, n - 1).to(tl.int64)
    token = tl.arange(0, BLOCK_T)
    byte = tl.arange(0, CHUNK // 2)
    low = byte // 16 * 32 + byte % 16
    weight_at = weight_ptr + weight_row[:, None] * stride + byte[None, :]
    scale_at = scale_ptr + weight_row[:, None] * grid_stride + (byte // 16)[None, :]
    x_at = x_ptr + token.to(tl.int64)[None, :] * x_stride
    live = (token < tokens)[None, :]
    pdl_wait(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, k, CHUNK):
        inside = (byte < width - start // 2)[None, :]
        codes = tl.load(weight_at + start // 2, mask=inside, other=0)
        scale = e8m0_values(tl.load(scale_at + start // 32, mask=inside, other=0))
        column = start + low
        x_low = tl.load(x_at + column[:, None], mask=live & (column < k)[:, None], other=0.0)
        x_high = tl.load(
            x_at + (column + 16)[:, None], mask=live & (column + 16 < k)[:, None], other=0.0
        )
        w_low = (e2m1_values(codes & 15) * scale).to(x_low.dtype)
        w_high = (e2m1_values(codes >> 4) * scale).to(x_low.dtype)
        total = tl.dot(w_low, x_low, total, input_precision="ieee")
        total = tl.dot(w_high, x_high, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    target = out_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(row < n)[:, None] & live)


KERNELS = groupwise.kernels(MAX_ROWS, _gemm, dequantize_weight)
run = run_first(KERNELS, DECLARATION)
