"""SwiGLU with an 8-bit output, one row per program.

Computes: values[M, N] = quantize(silu(gate) · up) of gate_up[M, 2 N], one static factor or a
    dynamic scale per row
Dtypes: gate_up bfloat16, float16 or float32; values int8 or e4m3; float32 scales
Layout: rows
Range: any M; N ≤ 32,768
Technique: whole rows in registers, cached launcher, PDL
Ops: silu_mul_quant

Gate and up are read once and held in registers until the row's maximum is known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.triton.common.device import as_rows, next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.norm_quantize.output_dtype_support import (
    supports_output_and_wide_input_dtype,
)

MAX_WIDTH = 32768
_MIN_AMAX = tl.constexpr(1e-6)
_ROUNDING_MAGIC_NUMBER = tl.constexpr(12582912.0)  # 1.5 · 2²³: float32 of this size are integers


SUPPORTED_PROBLEMS = (
    RowOpSupportRange(max_width=2 * MAX_WIDTH, fits=supports_output_and_wide_input_dtype),
)


def run(
    gate_up: torch.Tensor, dtype: torch.dtype, inv_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the op; the gate is rounded once."""
    flat = as_rows(gate_up)
    rows, inner = flat.shape[0], flat.shape[1] // 2
    values = torch.empty((rows, inner), dtype=dtype, device=flat.device)
    scale = (
        None
        if inv_scale is not None
        else torch.empty(gate_up.shape[:-1], dtype=torch.float32, device=flat.device)
    )
    block = next_power_of_two(inner)
    pdl, fixed = pdl_launch_options(flat.device, rows), (inner, flat.stride(0))
    _launcher(
        (rows, 1, 1),
        (flat, values, flat if scale is None else scale, flat if inv_scale is None else inv_scale),
        fixed,
        fixed,
        (
            inv_scale is None,
            dtype is torch.int8,
            127.0 if dtype is torch.int8 else 448.0,
            pdl["PDL"],
            block,
        ),
        {
            "num_warps": max(1, min(16, block // (512 if rows > 1 else 256))),
            "launch_pdl": pdl["launch_pdl"],
        },
    )
    return values.view(*gate_up.shape[:-1], inner), scale


@triton.jit
def _kernel(
    x_ptr, values_ptr, scale_ptr, factor_ptr, inner, stride,
    DYNAMIC: tl.constexpr, IS_INT8: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inner
    pdl_wait_and_trigger(PDL)
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * stride + inner + column, mask=inside, other=0.0)
    gate32 = gate.to(tl.float32)
    y = (gate32 / (1.0 + tl.exp(-gate32)) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    if DYNAMIC:
        amax = tl.maximum(tl.max(tl.abs(y), axis=0), _MIN_AMAX)
        quant_max = amax * 0.0 + MOST
        y *= tl.div_rn(quant_max, amax)
        tl.store(scale_ptr + row, tl.div_rn(amax, quant_max))
    else:
        y *= tl.load(factor_ptr)
    y = tl.minimum(tl.maximum(y, -MOST), MOST)
    if IS_INT8:
        # The last byte of the bits is then the value, rounded half to even.
        y = (y + _ROUNDING_MAGIC_NUMBER).to(tl.int32, bitcast=True)
    tl.store(values_ptr + row * inner + column, y.to(values_ptr.dtype.element_ty), mask=inside)


_launcher = CachedLauncher(_kernel)
