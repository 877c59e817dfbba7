"""SwiGLU's gate: one read of gate and up, one write, arithmetic in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import multiprocessors, power_of_two, rows_of
from modelmill.ops.triton.early import enter, launch
from modelmill.ops.triton.quick import Quick


def supports(gate_up: torch.Tensor) -> bool:
    """Any shape with something in it."""
    return gate_up.numel() > 0


def run(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference, rounded once."""
    flat = rows_of(gate_up)
    rows, inner = flat.shape[0], flat.shape[1] // 2
    out = torch.empty((rows, inner), dtype=flat.dtype, device=flat.device)
    # A few rows need small blocks to reach every multiprocessor; many rows want wide ones.
    few = rows * inner < 4096 * multiprocessors(flat.device)
    block = min(256 if few else 2048, power_of_two(inner))
    across = -(-inner // block)
    early, fixed = launch(flat.device, rows), (inner, flat.stride(0), across)
    _quick(
        (rows * across, 1, 1),
        (flat, out),
        fixed,
        fixed,
        (block, early["EARLY"]),
        {"num_warps": max(1, min(8, block // 256)), "launch_pdl": early["launch_pdl"]},
    )
    return out.view(*gate_up.shape[:-1], inner)


@triton.jit
def _kernel(x_ptr, out_ptr, inner, stride, across, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    enter(EARLY)
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * stride + inner + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    out = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out_ptr + row * inner + column, out.to(gate.dtype), mask=inside)


_quick = Quick(_kernel)
