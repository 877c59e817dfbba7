"""SwiGLU: one read of gate and up, one write, arithmetic in float32.

Computes: out[M, N] = silu(gate) · up of gate_up[M, 2 N]
Dtypes: bfloat16, float16 or float32; float32 arithmetic
Layout: rows
Range: any M
Technique: elementwise, cached launcher, PDL
Ops: silu_mul
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.triton.common.device import as_rows, next_power_of_two, sm_count
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

SUPPORTED_PROBLEMS = (RowOpSupportRange(),)


def run(gate_up: torch.Tensor) -> torch.Tensor:
    """Run the op, rounding once."""
    flat = as_rows(gate_up)
    rows, inner = flat.shape[0], flat.shape[1] // 2
    out = torch.empty((rows, inner), dtype=flat.dtype, device=flat.device)
    # A few rows need small blocks to use all SMs; many rows are faster with large ones.
    is_small = rows * inner < 4096 * sm_count(flat.device)
    block = min(256 if is_small else 2048, next_power_of_two(inner))
    blocks_per_row = -(-inner // block)
    pdl, fixed = pdl_launch_options(flat.device, rows), (inner, flat.stride(0), blocks_per_row)
    _launcher(
        (rows * blocks_per_row, 1, 1),
        (flat, out),
        fixed,
        fixed,
        (block, pdl["PDL"]),
        {"num_warps": max(1, min(8, block // 256)), "launch_pdl": pdl["launch_pdl"]},
    )
    return out.view(*gate_up.shape[:-1], inner)


@triton.jit
def _kernel(x_ptr, out_ptr, inner, stride, blocks_per_row, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    column = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    pdl_wait_and_trigger(PDL)
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * stride + inner + column, mask=inside, other=0.0)
    gate32 = gate.to(tl.float32)
    out = gate32 / (1.0 + tl.exp(-gate32)) * up.to(tl.float32)
    tl.store(out_ptr + row * inner + column, out.to(gate.dtype), mask=inside)


_launcher = CachedLauncher(_kernel)
