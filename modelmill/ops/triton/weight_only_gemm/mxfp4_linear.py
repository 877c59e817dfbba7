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

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.mxfp4_linear import BLOCK_COLUMNS, DECLARATION
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.weight_only_gemm import groupwise
from modelmill.ops.triton.weight_only_gemm.dequant import (
    launch_dequantize_nibbles,
    load_packed_nibbles,
    store_nibbles,
    store_product,
)
from modelmill.ops.triton.weight_only_gemm.groupwise import launch_config
from modelmill.ops.triton.weight_only_gemm.groupwise import supports as supports

SUPPORTED_DTYPES = (torch.bfloat16, torch.float32)
CHUNK = 128  # columns of a step


def _supports_problem(problem: object) -> bool:
    return (
        getattr(problem, "dtype", None) in SUPPORTED_DTYPES
        and getattr(problem, "group", 0) == BLOCK_COLUMNS
    )


SUPPORTED_PROBLEMS = tuple(
    replace(
        each, dtypes=tuple(t for t in each.dtypes if t in SUPPORTED_DTYPES), fits=_supports_problem
    )
    for each in groupwise.SUPPORTED_PROBLEMS
)


def _gemm(inputs: GroupwiseLinearInputs, out: torch.Tensor) -> None:
    """The product of a few rows; sums in float32."""
    x, weight, scale, _, _, bias = inputs
    (tokens, n), k = out.shape, x.shape[1]
    block_t, block_n, stages, warps = launch_config(tokens)
    _mxfp4_gemm_kernel[(-(-n // block_n),)](
        x, weight, scale, x if bias is None else bias, out,
        tokens, n, k, weight.shape[1], x.stride(0), weight.stride(0), scale.stride(0),
        BIAS=bias is not None, CHUNK=CHUNK, BLOCK_T=block_t, BLOCK_N=block_n, num_stages=stages,
        num_warps=warps,
        **pdl_launch_options(x.device, tokens),
    )  # fmt: skip


def dequantize_weight(inputs: GroupwiseLinearInputs) -> torch.Tensor:
    """The weight of a product as [N, K] of x's dtype."""
    return launch_dequantize_nibbles(_launcher, inputs, ())


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
    row, run, in_range, codes = load_packed_nibbles(weight_ptr, n, width, stride, BLOCK_N, RUNS)
    grid = row[:, None] * grid_stride + run[None, :]
    scale = e8m0_values(tl.load(scale_ptr + grid, mask=in_range, other=0))[:, :, None]
    low, high = e2m1_values(codes & 15) * scale, e2m1_values(codes >> 4) * scale
    store_nibbles(out_ptr, low, high, row, run, in_range, k)


_launcher = CachedLauncher(_dequantize_kernel)


@triton.jit(do_not_specialize=["tokens"])
def _mxfp4_gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
    tokens, n, k, width, x_stride, stride, grid_stride,
    BIAS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
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
    pdl_wait_and_trigger(PDL)
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
    store_product(out_ptr, total, bias_ptr, row, token, n, n, live, BIAS)


KERNELS = groupwise.make_kernels(_gemm, dequantize_weight)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
