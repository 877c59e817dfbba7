"""Products with group-wise 8-bit weights: integers in x's dtype on tensor cores, scaled per group.

Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ (+ bias[N])
Dtypes: x and out bfloat16, float16 or (M ≤ 16) float32; int8 weights
Layout: row-major; scales and offsets [N, groups]
Range: M ≤ 64 (more rows: dequantized for cuBLAS); groups of a multiple of 32 columns
Technique: tensor cores with the weight as left operand, scaled per group, PDL
Ops: int8_group_linear

With more than MAX_ROWS rows the weight is dequantized to x's dtype for cuBLAS (``dequant.py``).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.int8_group_linear import DECLARATION
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.weight_only_gemm.dequant import dequantize, store_product
from modelmill.ops.triton.weight_only_gemm.groupwise import SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS
from modelmill.ops.triton.weight_only_gemm.groupwise import launch_config, make_kernels
from modelmill.ops.triton.weight_only_gemm.groupwise import supports as supports

CHUNK = 128  # maximum columns of a product


def _gemm(inputs: GroupwiseLinearInputs, out: torch.Tensor) -> None:
    """The product of a few rows; sums in float32."""
    x, weight, scale, offset, group, bias = inputs
    (tokens, n), k = out.shape, x.shape[1]
    block_t, block_n, stages, warps = launch_config(tokens)
    _int8_group_gemm_kernel[(-(-n // block_n),)](
        x, weight, scale, scale if offset is None else offset, x if bias is None else bias, out,
        tokens, n, k, x.stride(0), weight.stride(0), scale.stride(0),
        OFFSET=offset is not None, BIAS=bias is not None, GROUP=group, CHUNK=math.gcd(group, CHUNK),
        BLOCK_T=block_t, BLOCK_N=block_n, num_stages=stages, num_warps=warps,
        **pdl_launch_options(x.device, tokens),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _int8_group_gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, bias_ptr, out_ptr, tokens, n, k, x_stride, stride,
    grid_stride,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last one; their results are not stored
    weight_row = tl.minimum(row, n - 1).to(tl.int64)
    token = tl.arange(0, BLOCK_T)
    column = tl.arange(0, CHUNK)
    weight_at = weight_ptr + weight_row[:, None] * stride + column[None, :]
    x_at = x_ptr + token.to(tl.int64)[None, :] * x_stride + column[:, None]
    live = (token < tokens)[None, :]
    pdl_wait_and_trigger(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, k, CHUNK):
        inside = column < k - start
        w = tl.load(weight_at + start, mask=inside[None, :], other=0)
        x = tl.load(x_at + start, mask=live & inside[:, None], other=0.0)
        part = tl.dot(w.to(x.dtype), x, input_precision="ieee")
        scale = tl.load(scale_ptr + weight_row * grid_stride + start // GROUP).to(tl.float32)
        total += part * scale[:, None]
        if OFFSET:
            offset = tl.load(offset_ptr + weight_row * grid_stride + start // GROUP).to(tl.float32)
            total += offset[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    store_product(out_ptr, total, bias_ptr, row, token, n, n, live, BIAS)


KERNELS = make_kernels(_gemm, dequantize)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
