"""The router's logits in float32, without copies of x or the weight in float32.

Computes: out[M, E] = x[M, K] · weight[E, K]ᵀ · scale + bias[E]
Dtypes: x and weight bfloat16, float16 or (M ≤ 16) float32; out float32; float32 sums
Layout: row-major, contiguous rows
Range: any M (float32: M ≤ 16)
Technique: GEMV with one expert's row in a program (M ≤ 16), tensor cores, PDL
Ops: router_gemm

Products of 16-bit values are exact in float32, so tensor cores lose nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.kernel_support import HALF_DTYPES
from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_GEMV_ROWS = 16
# (tokens, experts, columns) of a program on tensor cores
_FEW_ROWS_TILE, _MANY_ROWS_TILE = (16, 16, 256), (32, 64, 128)
_MANY_ROWS_TILE_MIN_ROWS = 2048


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> bool:
    """Contiguous rows; more than MAX_GEMV_ROWS in one 16-bit dtype."""
    if x.dim() != 2 or not len(x) or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    if torch.float64 in (x.dtype, weight.dtype) or not (bias is None or bias.is_contiguous()):
        return False
    return len(x) <= MAX_GEMV_ROWS or (x.dtype == weight.dtype and x.dtype in HALF_DTYPES)


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Run the op with float32 sums."""
    (tokens, k), experts = x.shape, len(weight)
    out = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    sizes = (experts, k, x.stride(0), weight.stride(0))
    tensors = (x, weight, weight if bias is None else bias, out)
    pdl = pdl_launch_options(x.device, tokens)
    if tokens <= MAX_GEMV_ROWS:
        block = min(2048, max(8, next_power_of_two(k)))
        _gemv_launcher(
            (experts, tokens, 1), tensors, (*sizes, float(scale)), sizes,
            (bias is not None, k % block == 0, block, pdl["PDL"]),
            {"num_warps": 4, "launch_pdl": pdl["launch_pdl"]},
        )  # fmt: skip
        return out
    rows, columns, depth = _FEW_ROWS_TILE if tokens < _MANY_ROWS_TILE_MIN_ROWS else _MANY_ROWS_TILE
    block = min(depth, max(16, next_power_of_two(k)))
    _gemm_launcher(
        (-(-experts // columns), -(-tokens // rows), 1), tensors,
        (tokens, *sizes, float(scale)), sizes,
        (bias is not None, k % block == 0, rows, columns, block, pdl["PDL"]),
        {"num_warps": 2 if rows == 16 else 4, "num_stages": 3, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip
    return out


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, experts, k, x_stride, stride, scale,
    BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    source = weight_ptr + expert * stride + column
    # the first weights are loaded before the wait for x
    if EVEN:
        w = tl.load(source)
    else:
        w = tl.load(source, mask=column < k, other=0.0)
    pdl_wait_and_trigger(PDL)
    total = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, k, BLOCK_K):
        left = k - start
        next_w = tl.load(source + start + BLOCK_K, mask=column < left - BLOCK_K, other=0.0)
        x = tl.load(x_ptr + token * x_stride + start + column, mask=column < left, other=0.0)
        total += w.to(tl.float32) * x.to(tl.float32)
        w = next_w
    logit = tl.sum(total) * scale
    if BIAS:
        logit += tl.load(bias_ptr + expert).to(tl.float32)
    tl.store(out_ptr + token * experts + expert, logit)


@triton.jit(do_not_specialize=["tokens"])
def _gemm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, tokens, experts, k, x_stride, stride, scale,
    BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + tl.minimum(expert, experts - 1)[:, None] * stride + column[None, :]
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    x_at = x_ptr + row[:, None] * x_stride + column[None, :]
    pdl_wait_and_trigger(PDL)
    total = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN:
            x = tl.load(x_at + start)
            w = tl.load(weight_at + start)
        else:
            inside = (column < k - start)[None, :]
            x = tl.load(x_at + start, mask=inside, other=0.0)
            w = tl.load(weight_at + start, mask=inside, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    total *= scale
    if BIAS:
        bias = tl.load(bias_ptr + tl.minimum(expert, experts - 1))
        total += bias.to(tl.float32)[None, :]
    target = out_ptr + row[:, None] * experts + expert[None, :]
    tl.store(target, total, mask=(token < tokens)[:, None] & (expert < experts)[None, :])


_gemv_launcher, _gemm_launcher = CachedLauncher(_gemv_kernel), CachedLauncher(_gemm_kernel)
