"""SwiGLU's gate by rows in C++ (silu_mul.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.row_op_support import RowOpSupportRange

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("silu_mul", "ppqqi")
_DTYPE_CODES = build.DTYPE_CODES
SUPPORTED_PROBLEMS = (RowOpSupportRange(dtypes=tuple(_DTYPE_CODES), dims=(2, 2)),)


def run(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    inner = width // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype)
    _kernel()(out.data_ptr(), gate_up.data_ptr(), rows, inner, _DTYPE_CODES[gate_up.dtype])
    return out
