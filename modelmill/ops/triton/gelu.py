"""GELU by the error function, elementwise in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import multiprocessors
from modelmill.ops.triton.early import enter, launch


def supports(x: torch.Tensor) -> bool:
    """Contiguous and not empty."""
    return x.is_contiguous() and x.numel() > 0


def run(x: torch.Tensor) -> torch.Tensor:
    """As the reference, rounded once."""
    out = torch.empty_like(x)
    count = x.numel()
    block = 256 if count < 4096 * multiprocessors(x.device) else 2048
    _kernel[(triton.cdiv(count, block),)](
        x, out, count, BLOCK=block, num_warps=max(1, block // 256), **launch(x.device, count // x.shape[-1])
    )
    return out


@triton.jit
def _kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    enter(EARLY)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, bent(x.to(tl.float32)).to(x.dtype), mask=inside)


@triton.jit
def bent(x):
    """x · Φ(x) of float32 values."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
