"""Activations to clustered integers in C++ (rptq_linear.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.rptq_quant import RptqQuantInputs

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("rptq_quant", "pppppppqqqqiii")
_DTYPE_CODES = build.DTYPE_CODES
SUPPORTED_PROBLEMS = (
    RowOpSupportRange(dtypes=tuple(_DTYPE_CODES), dims=(2, 2), packed_dtypes=True),
)


def supports(inputs: RptqQuantInputs) -> bool:
    """Whether tables are contiguous, with a factor for each column."""
    perm, inv_scale, zero_point, group_step = *inputs[1:4], inputs.group_step
    tables = (perm, inv_scale, zero_point, group_step)
    packed = all(each is None or each.is_contiguous() for each in tables)
    complete = group_step is None or (zero_point is not None and group_step.dtype is torch.float32)
    return packed and complete and (inv_scale is None or inv_scale.numel() == perm.numel())


def run(inputs: RptqQuantInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the op on the CPU; same contract as the reference."""
    x, perm, inv_scale, zero_point, bits, group, gated, group_step = inputs
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    columns = perm.numel()
    q = torch.empty(rows, columns, dtype=torch.int8)
    static = inv_scale is not None and group_step is None
    step = None if static else torch.empty(rows, columns // group)
    pointers = [
        None if t is None else t.data_ptr()
        for t in (q, step, x, perm, inv_scale, zero_point, group_step)
    ]
    _kernel()(*pointers, rows, width, columns, group, bits, gated, _DTYPE_CODES[x.dtype])
    return q, step
