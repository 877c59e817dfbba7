"""The square of ReLU in one pass.

Computes: out = max(x, 0)², elementwise
Dtypes: bfloat16, float16 or float32; float32 arithmetic
Layout: contiguous
Range: any M
Technique: elementwise, cached launcher, PDL
Ops: relu2
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.kernel_support import HALF_AND_FLOAT32_DTYPES
from modelmill.ops.triton.common.device import plan_elementwise_launch
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger


def supports(x: torch.Tensor) -> bool:
    """Whether x is contiguous, of these dtypes."""
    return x.numel() > 0 and x.is_contiguous() and x.dtype in HALF_AND_FLOAT32_DTYPES


def run(x: torch.Tensor) -> torch.Tensor:
    """Run the op, rounding once."""
    out = torch.empty_like(x)
    programs, block, warps = plan_elementwise_launch(x)
    pdl = pdl_launch_options(x.device, x.numel() // x.shape[-1])
    _launcher(
        (programs, 1, 1),
        (x, out),
        (x.numel(),),
        (),
        (block, x.numel() % block == 0, pdl["PDL"]),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait_and_trigger(PDL)
    # a mask of a number that the compiler does not know would make each load one of 2 bytes
    inside = None if EVEN else at < count
    x = tl.load(x_ptr + at, mask=inside)
    positive = tl.where(x > 0, x, 0.0).to(tl.float32)
    # a NaN is not greater than 0
    out = tl.where(x == x, positive * positive, x.to(tl.float32))
    tl.store(out_ptr + at, out.to(x.dtype), mask=inside)


_launcher = CachedLauncher(_kernel)
