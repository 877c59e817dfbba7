"""Activations to clustered integers: one program for some columns of a token, gate and permutation
on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import as_rows, power_of_two
from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.pdl import pdl_launch_options, pdl_wait

_MIN_AMAX = tl.constexpr(1e-6)
_ROUND_TO_INT = tl.constexpr(12582912.0)  # 1.5 · 2²³: a float32 of this size is a whole number


def supports(
    x: torch.Tensor,
    perm: torch.Tensor,
    inv_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    bits: int,
    group: int,
    gated: bool = False,
) -> bool:
    """Everything packed; a factor for each column."""
    packed = all(
        t is None or (t.is_contiguous() and t.numel() == perm.numel())
        for t in (perm, inv_scale, zero_point)
    )
    return x.dim() == 2 and x.numel() > 0 and packed and (inv_scale is not None or group <= 8192)


def run(
    x: torch.Tensor,
    perm: torch.Tensor,
    inv_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    bits: int,
    group: int,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference."""
    flat = as_rows(x)
    rows, columns = flat.shape[0], perm.numel()
    q = torch.empty((rows, columns), dtype=torch.int8, device=x.device)
    own = inv_scale is None
    step = (
        torch.empty((rows, columns // group), dtype=torch.float32, device=x.device) if own else None
    )
    # A program's columns: those of a group where it finds its step, else as many as are worth a
    # program.
    each = group if own else 512
    block = power_of_two(each)
    _kernel[(rows, -(-columns // each))](
        flat, perm, perm if inv_scale is None else inv_scale,
        perm if zero_point is None else zero_point, q,
        flat if step is None else step, columns, flat.stride(0), flat.shape[1] // 2, each,
        GATED=gated, OWN=own, SHIFT=zero_point is not None, MOST=float(2 ** (bits - 1) - 1),
        BLOCK=block,
        num_warps=max(1, min(4, block // 128)), **pdl_launch_options(x.device, rows),
    )  # fmt: skip
    return q, step


@triton.jit
def _kernel(
    x_ptr, order_ptr, factor_ptr, zero_ptr, q_ptr, step_ptr, columns, stride, half, each,
    GATED: tl.constexpr, OWN: tl.constexpr, SHIFT: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    column = part * each + lane
    inside = (lane < each) & (column < columns)
    order = tl.load(order_ptr + column, mask=inside, other=-1)
    real = order >= 0
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * stride + order, mask=real, other=0.0)
    y = x.to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * stride + half + order, mask=real, other=0.0).to(tl.float32)
        # Rounded where the reference rounds.
        y = (y / (1.0 + tl.exp(-y))).to(x.dtype).to(tl.float32)
        y = (y * up).to(x.dtype).to(tl.float32)
    if OWN:
        amax = tl.maximum(tl.max(tl.abs(y), axis=0), _MIN_AMAX)
        most = amax * 0.0 + MOST
        y *= tl.div_rn(most, amax)
        tl.store(step_ptr + row * (columns // each) + part, tl.div_rn(amax, most))
    else:
        y *= tl.load(factor_ptr + column, mask=real, other=0.0)
    # Beyond 2²² the trick rounds nothing; such values are at the ends anyway, zero-points being at
    # most 1e4.
    y = tl.minimum(tl.maximum(y, -65536.0), 65536.0)
    y = (y + _ROUND_TO_INT) - _ROUND_TO_INT
    if SHIFT:
        y += tl.load(zero_ptr + column, mask=real, other=0).to(tl.float32)
    y = tl.minimum(tl.maximum(y, -MOST - SHIFT), MOST)
    tl.store(q_ptr + row * columns + column, tl.where(real, y, 0.0).to(tl.int8), mask=inside)
