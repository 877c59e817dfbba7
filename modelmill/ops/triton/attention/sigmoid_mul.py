"""The gate of an attention's output in one pass.

Computes: out[M, N] = x · sigmoid(gate)
Dtypes: bfloat16, float16 or float32; float32 arithmetic
Layout: contiguous
Range: any M and N
Technique: elementwise, cached launcher, PDL
Ops: sigmoid_mul
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


def supports(x: torch.Tensor, gate: torch.Tensor) -> bool:
    """Contiguous values of one dtype."""
    return (
        x.numel() > 0
        and x.dtype is gate.dtype
        and x.dtype in HALF_AND_FLOAT32_DTYPES
        and x.is_contiguous()
        and gate.is_contiguous()
    )


def run(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Run the op, rounding once."""
    out = torch.empty_like(x)
    programs, block, warps = plan_elementwise_launch(x)
    pdl = pdl_launch_options(x.device, len(x))
    _launcher(
        (programs, 1, 1),
        (x, gate, out),
        (x.numel(),),
        (),
        (block, x.numel() % block == 0, pdl["PDL"]),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _kernel(
    x_ptr, gate_ptr, out_ptr, count, BLOCK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait_and_trigger(PDL)
    # a mask of a number that the compiler does not know would make each load one of 2 bytes
    inside = None if EVEN else at < count
    x = tl.load(x_ptr + at, mask=inside)
    gate = tl.load(gate_ptr + at, mask=inside).to(tl.float32)
    out = x.to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + at, out.to(x.dtype), mask=inside)


_launcher = CachedLauncher(_kernel)
