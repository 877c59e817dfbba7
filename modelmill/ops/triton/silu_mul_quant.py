"""SwiGLU's gate to 8 bits: a row a program, gate and up read once, held in registers until its largest is known."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import knows_fp8, power_of_two, rows_of
from modelmill.ops.triton.early import enter, launch
from modelmill.ops.triton.quick import Quick

WIDEST = 32768
_LEAST = tl.constexpr(1e-6)
_WHOLE = tl.constexpr(12582912.0)  # 1.5 · 2²³: a float32 of this size is a whole number


def supports(gate_up: torch.Tensor, kind: torch.dtype, factor: torch.Tensor | None = None) -> bool:
    """A device that knows the type; halves up to 32,768 wide."""
    known = kind is torch.int8 or knows_fp8(gate_up.device)
    return known and gate_up.numel() > 0 and gate_up.shape[-1] <= 2 * WIDEST and gate_up.dtype.itemsize > 1


def run(
    gate_up: torch.Tensor, kind: torch.dtype, factor: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference; the gate is rounded once."""
    flat = rows_of(gate_up)
    rows, inner = flat.shape[0], flat.shape[1] // 2
    values = torch.empty((rows, inner), dtype=kind, device=flat.device)
    scale = None if factor is not None else torch.empty(gate_up.shape[:-1], dtype=torch.float32, device=flat.device)
    block = power_of_two(inner)
    early, fixed = launch(flat.device, rows), (inner, flat.stride(0))
    _quick(
        (rows, 1, 1),
        (flat, values, flat if scale is None else scale, flat if factor is None else factor),
        fixed,
        fixed,
        (factor is None, kind is torch.int8, 127.0 if kind is torch.int8 else 448.0, early["EARLY"], block),
        {"num_warps": max(1, min(16, block // (512 if rows > 1 else 256))), "launch_pdl": early["launch_pdl"]},
    )
    return values.view(*gate_up.shape[:-1], inner), scale


@triton.jit
def _kernel(
    x_ptr, values_ptr, scale_ptr, factor_ptr, inner, stride,
    TOKEN: tl.constexpr, WHOLE: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inner
    enter(EARLY)
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * stride + inner + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    y = (wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    if TOKEN:
        amax = tl.maximum(tl.max(tl.abs(y), axis=0), _LEAST)
        most = amax * 0.0 + MOST
        y *= tl.div_rn(most, amax)
        tl.store(scale_ptr + row, tl.div_rn(amax, most))
    else:
        y *= tl.load(factor_ptr)
    y = tl.minimum(tl.maximum(y, -MOST), MOST)
    if WHOLE:
        # Its last byte is then the value, rounded half to even.
        y = (y + _WHOLE).to(tl.int32, bitcast=True)
    tl.store(values_ptr + row * inner + column, y.to(values_ptr.dtype.element_ty), mask=inside)


_quick = Quick(_kernel)
