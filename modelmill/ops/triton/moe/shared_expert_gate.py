"""The gate of a shared expert: a row dot product, its sigmoid and the scaled row in one launch.

Computes: out[M, H] = expert_out[M, H] · sigmoid(x[M, H] · weight[H])
Dtypes: bfloat16, float16 or float32; float32 sums
Layout: rows with contiguous columns
Range: any M; H up to 16,384
Technique: a program for a token, whole rows in registers; the weight is read before the wait,
    cached launcher, PDL
Ops: shared_expert_gate
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.kernel_support import HALF_AND_FLOAT32_DTYPES
from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_WIDTH = 16384


def supports(x: torch.Tensor, weight: torch.Tensor, expert_out: torch.Tensor) -> bool:
    """Rows with contiguous columns, of these dtypes; see Range."""
    tensors = x, weight, expert_out
    return (
        x.numel() > 0
        and x.shape[1] <= MAX_WIDTH
        and all(each.stride(1) == 1 and each.dtype in HALF_AND_FLOAT32_DTYPES for each in tensors)
    )


def run(x: torch.Tensor, weight: torch.Tensor, expert_out: torch.Tensor) -> torch.Tensor:
    """Run the op, rounding the sigmoid and the result."""
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=expert_out.dtype, device=x.device)
    block = next_power_of_two(width)
    pdl, fixed = pdl_launch_options(x.device, tokens), (width, x.stride(0), expert_out.stride(0))
    _launcher(
        (tokens, 1, 1),
        (x, weight, expert_out, out),
        fixed,
        fixed,
        (block, pdl["PDL"]),
        {"num_warps": max(1, min(16, block // 256)), "launch_pdl": pdl["launch_pdl"]},
    )
    return out


@triton.jit
def _kernel(
    x_ptr, weight_ptr, expert_ptr, out_ptr, width, x_stride, expert_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait_and_trigger(PDL)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    expert = tl.load(expert_ptr + token * expert_stride + column, mask=inside, other=0.0)
    gate = 1.0 / (1.0 + tl.exp(-tl.sum(x * weight, axis=0)))
    gate = gate.to(expert.dtype).to(tl.float32)
    out = (expert.to(tl.float32) * gate).to(expert.dtype)
    tl.store(out_ptr + token * width + column, out, mask=inside)


_launcher = CachedLauncher(_kernel)
