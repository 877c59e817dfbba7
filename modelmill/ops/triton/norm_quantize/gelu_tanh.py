"""Tanh approximation of GELU, elementwise in float32.

Computes: out = gelu_tanh(x), elementwise
Dtypes: bfloat16, float16 or float32; float32 arithmetic
Layout: contiguous
Range: any M
Technique: elementwise, PDL
Ops: gelu_tanh
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.common.device import plan_elementwise_launch
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.norm_quantize.gelu import SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS
from modelmill.ops.triton.norm_quantize.gelu import supports as supports


def run(x: torch.Tensor) -> torch.Tensor:
    """Run the op, rounding once."""
    out = torch.empty_like(x)
    programs, block, warps = plan_elementwise_launch(x)
    _kernel[(programs,)](
        x,
        out,
        x.numel(),
        BLOCK=block,
        num_warps=warps,
        **pdl_launch_options(x.device, x.numel() // x.shape[-1]),
    )
    return out


@triton.jit
def _kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    pdl_wait_and_trigger(PDL)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    x32 = x.to(tl.float32)
    # (1 + tanh u) / 2 = sigmoid(2u): nothing cancels for small or very negative u.
    two_u = 1.5957691216057308 * (x32 + 0.044715 * x32 * x32 * x32)
    out = x32 / (1.0 + tl.exp(-two_u))
    tl.store(out_ptr + at, out.to(x.dtype), mask=inside)
