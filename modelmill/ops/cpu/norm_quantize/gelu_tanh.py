"""GELU's tanh form in C++ (gelu_tanh.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.row_op_support import RowOpSupportRange

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("gelu_tanh", "ppqi")
_DTYPE_CODES = build.DTYPE_CODES
SUPPORTED_PROBLEMS = (RowOpSupportRange(dtypes=tuple(_DTYPE_CODES)),)


def run(x: torch.Tensor) -> torch.Tensor:
    """Compute the op on the CPU; same contract as the reference."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _kernel()(out.data_ptr(), x.data_ptr(), x.numel(), _DTYPE_CODES[x.dtype])
    return out
