"""RMSNorm of groups of channels with a SiLU gate, before it or behind it, in one pass.

Computes: out[M, N] = rmsnorm(x[M, N]) · weight · silu(gate), rmsnorm(x · silu(gate)) · weight, or
    x · silu(gate); a norm for each group of columns
Dtypes: x float32; gate, weight and out bfloat16, float16 or float32; float32 arithmetic
Layout: x contiguous, rows of the gate with contiguous columns; weight[N], or one for all groups
Range: any M; groups up to 16,384 columns
Technique: whole groups in registers, narrow ones side by side in a program; the weight is read
    before the wait, cached launcher, PDL
Ops: gated_rms_norm
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.gated_rms_norm import GatedRMSNormInputs
from modelmill.ops.kernel_support import HALF_AND_FLOAT32_DTYPES
from modelmill.ops.triton.common.device import plan_row_launch
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_GROUP = 16384


def supports(inputs: GatedRMSNormInputs) -> bool:
    """Rows with contiguous columns, of these dtypes; see Range."""
    x, gate, weight, _, group, _ = inputs
    return (
        x.numel() > 0
        and x.dtype is torch.float32
        and x.is_contiguous()
        and gate.stride(1) == 1
        and gate.dtype in HALF_AND_FLOAT32_DTYPES
        and (weight is None or (weight.dtype in HALF_AND_FLOAT32_DTYPES and weight.is_contiguous()))
        and group <= MAX_GROUP
    )


def run(inputs: GatedRMSNormInputs) -> torch.Tensor:
    """Run the op, rounding once."""
    x, gate, weight, eps, group, gate_first = inputs
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=gate.dtype, device=x.device)
    groups = width // group
    rows_per_program, block, warps = plan_row_launch(x.view(-1, group))
    pdl, fixed = pdl_launch_options(x.device, tokens), (groups, group, gate.stride(0))
    _launcher(
        (-(-tokens * groups // rows_per_program), 1, 1),
        (x, gate, x if weight is None else weight, out),
        (tokens * groups, *fixed, eps),
        fixed,
        (
            weight is not None, weight is not None and len(weight) == width, gate_first,
            rows_per_program, block, pdl["PDL"],
        ),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, rows, groups, group, gate_stride, eps,
    NORMS: tl.constexpr, BY_CHANNEL: tl.constexpr, GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row is a group of a token."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < group)
    first = row % groups * group
    if NORMS:
        at = first + column if BY_CHANNEL else column + 0 * row
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    pdl_wait_and_trigger(PDL)
    x = tl.load(x_ptr + row * group + column, mask=inside, other=0.0)
    gate_at = gate_ptr + row // groups * gate_stride + first + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    factor = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST or not NORMS:
        x = x * factor
    if NORMS:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / group + eps)
        x = x * scale[:, None] * weight
        if not GATE_FIRST:
            x = x * factor
    tl.store(out_ptr + row * group + column, x.to(out_ptr.dtype.element_ty), mask=inside)


_launcher = CachedLauncher(_kernel)
