"""Products with 4-bit weights: codes are converted to 16 bits and multiplied on tensor cores.

Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ (+ bias[N])
Dtypes: x and out bfloat16, float16 or (M ≤ 16) float32; packed int4 codes
Layout: row-major; codes as in ops/int4_linear.py; scales and offsets [N, groups]
Range: M ≤ 64 (more rows: dequantized for cuBLAS); groups of a multiple of 32 columns
Technique: magic-number dequantization, tensor cores with the weight as left operand, cached
    launcher, PDL
Ops: int4_linear

The low nibbles of 16 bytes are 16 neighbouring columns and the high nibbles the next 16: each chunk
of a group is two products, of all low and of all high nibbles, with the matching columns of x. A
code c combined with the exponent of 128 (bfloat16; 1024 in float16) reads as 128 + c without a
conversion. This adds 128 times the sum of x, which the offsets need anyway: y = Σ_g scale · acc_g +
(offset − 128 · scale) · Σ x_g.

With more than MAX_ROWS rows the product is compute-bound and cuBLAS is fastest: the weight is
dequantized to x's dtype, rounded once, and multiplied there.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.int4_linear import DECLARATION
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.weight_only_gemm.dequant import (
    launch_dequantize_nibbles,
    load_packed_nibbles,
    store_nibbles,
    store_product,
)
from modelmill.ops.triton.weight_only_gemm.groupwise import SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS
from modelmill.ops.triton.weight_only_gemm.groupwise import make_kernels
from modelmill.ops.triton.weight_only_gemm.groupwise import supports as supports

ZERO_POINT = 8  # the code of 0 in a symmetric weight
# maximum columns of a chunk: two products with 64 columns each
CHUNK = 128
CODE_BIAS_BY_DTYPE = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: 0}


def _gemm(inputs: GroupwiseLinearInputs, out: torch.Tensor) -> None:
    """The product of a few rows; sums in float32."""
    x, weight, scale, offset, group, bias = inputs
    (tokens, n), k = out.shape, x.shape[1]
    block_t, block_n, stages, warps = _launch_config(tokens, n)
    _int4_gemm_kernel[(-(-n // block_n), -(-tokens // block_t))](
        x, weight, scale, scale if offset is None else offset, x if bias is None else bias, out,
        tokens, n, k, weight.shape[1], x.stride(0), weight.stride(0), scale.stride(0),
        out.stride(0),
        OFFSET=offset is not None, BIAS=bias is not None, ZERO=ZERO_POINT, GROUP=group,
        CHUNK=math.gcd(group, CHUNK),
        CODE_BIAS=CODE_BIAS_BY_DTYPE[x.dtype], BLOCK_T=block_t, BLOCK_N=block_n, num_stages=stages,
        num_warps=warps,
        **pdl_launch_options(x.device, tokens),
    )  # fmt: skip


def _launch_config(tokens: int, n: int) -> tuple[int, int, int, int]:
    """(tokens per program, weight rows per program, stages, warps).

    Few tokens use small programs, so that the whole memory bandwidth is used.
    """
    if tokens <= 16:
        return 16, 16 if n <= 16384 else 32, 6, 4
    return 32 if tokens <= 32 else 64, 64, 4, 4


def dequantize_weight(inputs: GroupwiseLinearInputs) -> torch.Tensor:
    """The weight of a product as [N, K] of x's dtype."""
    return launch_dequantize_nibbles(_launcher, inputs, (ZERO_POINT, inputs.group))


@triton.jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, offset_ptr, out_ptr, n, k, width, stride, grid_stride,
    OFFSET: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    row, run, in_range, codes = load_packed_nibbles(weight_ptr, n, width, stride, BLOCK_N, RUNS)
    # a group size is a multiple of 32
    grid = row[:, None] * grid_stride + (run * 32 // GROUP)[None, :]
    scale = tl.load(scale_ptr + grid, mask=in_range, other=0.0).to(tl.float32)
    if OFFSET:
        offset = tl.load(offset_ptr + grid, mask=in_range, other=0.0).to(tl.float32)
    else:
        offset = -ZERO * scale
    low = (codes & 15).to(tl.float32) * scale[:, :, None] + offset[:, :, None]
    high = (codes >> 4).to(tl.float32) * scale[:, :, None] + offset[:, :, None]
    store_nibbles(out_ptr, low, high, row, run, in_range, k)


_launcher = CachedLauncher(_dequantize_kernel)


@triton.jit(do_not_specialize=["tokens"])
def _int4_gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, bias_ptr, out_ptr,
    tokens, n, k, width, x_stride, stride, grid_stride, out_stride,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    CODE_BIAS: tl.constexpr, PDL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last one: a load without a mask is faster
    weight_row = tl.minimum(row, n - 1).to(tl.int64)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    byte = tl.arange(0, CHUNK // 2)
    low = byte // 16 * 32 + byte % 16
    weight_at = weight_ptr + weight_row[:, None] * stride + byte[None, :]
    x_at = x_ptr + token.to(tl.int64)[None, :] * x_stride
    live = (token < tokens)[None, :]
    pdl_wait_and_trigger(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, k, CHUNK):
        codes = tl.load(weight_at + start // 2, mask=(byte < width - start // 2)[None, :], other=0)
        column = start + low
        x_low = tl.load(x_at + column[:, None], mask=live & (column < k)[:, None], other=0.0)
        x_high = tl.load(
            x_at + (column + 16)[:, None], mask=live & (column + 16 < k)[:, None], other=0.0
        )
        part = biased_nibble_product(codes, x_low, x_high, CODE_BIAS)
        sums = tl.sum(x_low.to(tl.float32), axis=0) + tl.sum(x_high.to(tl.float32), axis=0)
        group = start // GROUP
        scale = tl.load(scale_ptr + weight_row * grid_stride + group).to(tl.float32)
        if OFFSET:
            offset = (
                tl.load(offset_ptr + weight_row * grid_stride + group).to(tl.float32)
                - CODE_BIAS * scale
            )
        else:
            offset = -(ZERO + CODE_BIAS) * scale
        total += part * scale[:, None] + offset[:, None] * sums[None, :]
    store_product(out_ptr, total, bias_ptr, row, token, n, out_stride, live, BIAS)


@triton.jit
def biased_nibble_product(codes, x_low, x_high, CODE_BIAS: tl.constexpr):
    """The product [N, T] of codes [N, R] plus CODE_BIAS with x [R, T].

    x_low: of the columns of the low nibbles; x_high: of the high ones.
    """
    part = tl.dot(
        _nibbles_as_biased_floats(codes & 15, x_low, CODE_BIAS), x_low, input_precision="ieee"
    )
    return tl.dot(
        _nibbles_as_biased_floats(codes >> 4, x_low, CODE_BIAS),
        x_high,
        part,
        input_precision="ieee",
    )


@triton.jit
def _nibbles_as_biased_floats(codes, like, CODE_BIAS: tl.constexpr):
    """Codes 0…15 as numbers of the dtype of ``like``, with CODE_BIAS added."""
    if CODE_BIAS == 0:
        return codes.to(like.dtype)
    elif CODE_BIAS == 128:  # noqa: RET505  Triton needs all branches
        return (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)


KERNELS = make_kernels(_gemm, dequantize_weight)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
