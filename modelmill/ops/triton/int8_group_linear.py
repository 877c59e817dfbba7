"""Products with 8-bit weights in groups: whole numbers of x's type meet the tensor cores, scaled
group by group.

With more rows than MOST the weight is written out in x's type, and cuBLAS multiplies (written.py).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.dequant import dequantize, linear
from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.groupwise import supports as supports
from modelmill.ops.triton.pdl import pdl_launch_options, pdl_wait

CHUNK = 128  # columns of a product at most
# rows of x up to … → those and rows of the weight of a program, stages, warps
LAUNCH_CONFIGS = ((16, 16, 16, 6, 4), (32, 32, 64, 4, 4), (64, 64, 64, 4, 4))
MAX_ROWS = LAUNCH_CONFIGS[-1][0]


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; sums in float32."""
    tokens, k = x.shape
    n = weight.shape[0]
    if tokens > MAX_ROWS:
        return linear(x, dequantize(weight, scale, offset, group, k, x.dtype), bias)
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    block_t, block_n, stages, warps = next(
        sizes[1:] for sizes in LAUNCH_CONFIGS if tokens <= sizes[0]
    )
    _int8_group_gemm_kernel[(-(-n // block_n),)](
        x, weight, scale, scale if offset is None else offset, x if bias is None else bias, out,
        tokens, n, k, x.stride(0), weight.stride(0), scale.stride(0),
        OFFSET=offset is not None, BIAS=bias is not None, GROUP=group, CHUNK=math.gcd(group, CHUNK),
        BLOCK_T=block_t, BLOCK_N=block_n, num_stages=stages, num_warps=warps,
        **pdl_launch_options(x.device, tokens),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _int8_group_gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, bias_ptr, out_ptr, tokens, n, k, x_stride, stride,
    grid_stride,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last one: their results are not stored
    held = tl.minimum(row, n - 1).to(tl.int64)
    token = tl.arange(0, BLOCK_T)
    column = tl.arange(0, CHUNK)
    weight_at = weight_ptr + held[:, None] * stride + column[None, :]
    x_at = x_ptr + token.to(tl.int64)[None, :] * x_stride + column[:, None]
    live = (token < tokens)[None, :]
    pdl_wait(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, k, CHUNK):
        inside = column < k - start
        w = tl.load(weight_at + start, mask=inside[None, :], other=0)
        x = tl.load(x_at + start, mask=live & inside[:, None], other=0.0)
        part = tl.dot(w.to(x.dtype), x, input_precision="ieee")
        scale = tl.load(scale_ptr + held * grid_stride + start // GROUP).to(tl.float32)
        total += part * scale[:, None]
        if OFFSET:
            offset = tl.load(offset_ptr + held * grid_stride + start // GROUP).to(tl.float32)
            total += offset[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + held).to(tl.float32)[:, None]
    target = out_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(row < n)[:, None] & live)
