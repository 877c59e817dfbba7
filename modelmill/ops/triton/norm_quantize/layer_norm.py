"""LayerNorm with whole rows in registers: mean first, then the variance around it.

Computes: out[M, N] = layernorm(x[M, N]) · weight[N] + bias[N]
Dtypes: bfloat16, float16 or float32; float32 arithmetic
Layout: rows
Range: any M; N ≤ 32,768
Technique: whole rows in registers, PDL
Ops: layer_norm
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.triton.common.device import as_rows, plan_row_launch
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.norm_quantize.rms_norm import MAX_WIDTH

SUPPORTED_PROBLEMS = (RowOpSupportRange(max_width=MAX_WIDTH),)


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Run the op, rounding once."""
    flat = as_rows(x)
    rows, width = flat.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    rows_per_program, block, warps = plan_row_launch(flat)
    _kernel[(-(-rows // rows_per_program),)](
        flat, weight, bias, out, rows, width, flat.stride(0), eps,
        ROWS=rows_per_program, BLOCK=block, num_warps=warps, **pdl_launch_options(x.device, rows),
    )  # fmt: skip
    return out.view(x.shape)


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, width, stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    pdl_wait_and_trigger(PDL)
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    x32 = x.to(tl.float32)
    mean = tl.sum(x32, axis=1) / width
    centered = tl.where(inside, x32 - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, axis=1) / width + eps)
    out = centered * scale[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + row[:, None] * width + column[None, :], out.to(x.dtype), mask=inside)
