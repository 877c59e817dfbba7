"""Exact GELU (erf), elementwise in float32.

Computes: out = gelu(x), elementwise
Dtypes: bfloat16 or float16 (tanh approximation) or float32 (erf)
Layout: contiguous
Range: any M
Technique: elementwise, PDL
Ops: gelu

For 16-bit values the tanh approximation is used, whose error is below 5e-4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.triton.common.device import INTERPRETED, plan_elementwise_launch
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

SUPPORTED_PROBLEMS = (RowOpSupportRange(),)


def supports(x: torch.Tensor) -> bool:
    """Whether x is contiguous."""
    return x.is_contiguous()


def run(x: torch.Tensor) -> torch.Tensor:
    """Run the op, rounding once."""
    out = torch.empty_like(x)
    programs, block, warps = plan_elementwise_launch(x)
    _kernel[(programs,)](
        x, out, x.numel(), APPROXIMATE=x.dtype.itemsize == 2, ASSEMBLY=not INTERPRETED, BLOCK=block,
        num_warps=warps,
        **pdl_launch_options(x.device, x.numel() // x.shape[-1]),
    )  # fmt: skip
    return out


@triton.jit
def _kernel(
    x_ptr,
    out_ptr,
    count,
    APPROXIMATE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    pdl_wait_and_trigger(PDL)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(
        out_ptr + at, gelu_value(x.to(tl.float32), APPROXIMATE, ASSEMBLY).to(x.dtype), mask=inside
    )


@triton.jit
def gelu_value(x, APPROXIMATE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Compute x · Φ(x) of float32 values.

    APPROXIMATE: the tanh approximation for values that had 8 or 11 bits, a quarter of the work.
    """
    if APPROXIMATE:
        return (
            0.5
            * x
            * (1.0 + _fast_tanh(x * (0.7978845608028654 + 0.035677406412765714 * x * x), ASSEMBLY))
        )
    else:  # noqa: RET505  Triton compiles code after a return too
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _fast_tanh(x, ASSEMBLY: tl.constexpr):
    """Tanh to 11 bits in one instruction."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
