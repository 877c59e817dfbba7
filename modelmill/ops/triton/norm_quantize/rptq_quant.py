"""Activations quantized to clustered integers, with optional gate and permutation.

Computes: q[M, columns] = clamp(round(y[:, perm] / step)) with y = x or the SwiGLU of x; dynamic
    steps [M, groups] = amax / qmax; or static steps, longer where a row leaves the range in a group
Dtypes: x bfloat16, float16 or float32; q int8; float32 steps and factors
Layout: row-major; perm, factors and zero-points [columns]
Range: any M; dynamic groups of up to 8,192 columns
Technique: gathered loads, a program per part of a row, PDL
Ops: rptq_quant

A program computes some columns of one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.rptq_quant import RptqQuantInputs
from modelmill.ops.triton.common.device import as_rows, next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_GROUP = 8192
_MIN_AMAX = tl.constexpr(1e-6)
_ROUNDING_MAGIC_NUMBER = tl.constexpr(12582912.0)  # 1.5 · 2²³: float32 of this size are integers


SUPPORTED_PROBLEMS = (RowOpSupportRange(dims=(2, 2), fits=lambda rows: rows.group <= MAX_GROUP),)


def supports(inputs: RptqQuantInputs) -> bool:
    """All tensors contiguous; a scale for each column."""
    perm, *others = inputs[1:4]
    steps = inputs.group_step
    return (
        perm.is_contiguous()
        and (steps is None or steps.is_contiguous())
        and all(
            each is None or (each.is_contiguous() and each.numel() == perm.numel())
            for each in others
        )
    )


def run(inputs: RptqQuantInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the op with the Triton kernel; same contract as the reference."""
    x, perm, inv_scale, zero_point, bits, group, gated, group_step = inputs
    flat = as_rows(x)
    rows, columns = flat.shape[0], perm.numel()
    q = torch.empty((rows, columns), dtype=torch.int8, device=x.device)
    dynamic = inv_scale is None or group_step is not None
    step = (
        torch.empty((rows, columns // group), dtype=torch.float32, device=x.device)
        if dynamic
        else None
    )
    # Columns per program: a group if its step is computed here, else 512.
    columns_per_program = group if dynamic else 512
    block = next_power_of_two(columns_per_program)
    _kernel[(rows, -(-columns // columns_per_program))](
        flat, perm, perm if inv_scale is None else inv_scale,
        perm if zero_point is None else zero_point, q,
        flat if step is None else step, flat if group_step is None else group_step,
        columns, flat.stride(0), flat.shape[1] // 2,
        columns_per_program,
        GATED=gated, DYNAMIC=dynamic, FALLBACK=group_step is not None,
        SHIFT=zero_point is not None, MOST=float(2 ** (bits - 1) - 1), BLOCK=block,
        num_warps=max(1, min(4, block // 128)), **pdl_launch_options(x.device, rows),
    )  # fmt: skip
    return q, step


@triton.jit
def _kernel(
    x_ptr, order_ptr, factor_ptr, zero_ptr, q_ptr, step_ptr, group_step_ptr, columns, stride, half,
    columns_per_program,
    GATED: tl.constexpr, DYNAMIC: tl.constexpr, FALLBACK: tl.constexpr, SHIFT: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    column = part * columns_per_program + lane
    inside = (lane < columns_per_program) & (column < columns)
    order = tl.load(order_ptr + column, mask=inside, other=-1)
    real = order >= 0
    pdl_wait_and_trigger(PDL)
    x = tl.load(x_ptr + row * stride + order, mask=real, other=0.0)
    y = x.to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * stride + half + order, mask=real, other=0.0).to(tl.float32)
        # Rounded at the same places as in the reference.
        y = (y / (1.0 + tl.exp(-y))).to(x.dtype).to(tl.float32)
        y = (y * up).to(x.dtype).to(tl.float32)
    if DYNAMIC:
        if FALLBACK:
            y *= tl.load(factor_ptr + column, mask=real, other=0.0)
            # float32 of 2²² and more are integers, or a half beside one, which is as good
            y = tl.where(
                tl.abs(y) < 4194304.0, (y + _ROUNDING_MAGIC_NUMBER) - _ROUNDING_MAGIC_NUMBER, y
            )
            y += tl.load(zero_ptr + column, mask=real, other=0).to(tl.float32)
        amax = tl.maximum(tl.max(tl.abs(y), axis=0), MOST if FALLBACK else _MIN_AMAX)
        quant_max = amax * 0.0 + MOST
        y *= tl.div_rn(quant_max, amax)
        step = tl.div_rn(amax, quant_max)
        if FALLBACK:
            step *= tl.load(group_step_ptr + part)
        tl.store(step_ptr + row * (columns // columns_per_program) + part, step)
    else:
        y *= tl.load(factor_ptr + column, mask=real, other=0.0)
    # Adding 1.5 · 2²³ does not round values beyond 2²²; those are clamped anyway, because
    # zero-points are at most 1e4.
    y = tl.minimum(tl.maximum(y, -65536.0), 65536.0)
    y = (y + _ROUNDING_MAGIC_NUMBER) - _ROUNDING_MAGIC_NUMBER
    if SHIFT and not FALLBACK:
        y += tl.load(zero_ptr + column, mask=real, other=0).to(tl.float32)
    y = tl.minimum(tl.maximum(y, -MOST - SHIFT), MOST)
    tl.store(q_ptr + row * columns + column, tl.where(real, y, 0.0).to(tl.int8), mask=inside)
