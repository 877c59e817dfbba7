"""RMSNorm by rows in C++ (rms_norm.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.row_op_support import RowOpSupportRange

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("rms_norm", "pppqqdi")
_DTYPE_CODES = build.DTYPE_CODES
SUPPORTED_PROBLEMS = (RowOpSupportRange(dtypes=tuple(_DTYPE_CODES), same_dtype=True),)


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference."""
    x, weight = x.contiguous(), weight.contiguous()
    return run_row_kernel(_kernel(), x, (x.data_ptr(), weight.data_ptr()), eps)


def run_row_kernel(
    kernel: Callable[..., Any], x: torch.Tensor, pointers: tuple[int, ...], eps: float
) -> torch.Tensor:
    """Call a kernel of out, ``pointers``, rows, width, eps and dtype; returns out, of x's shape."""
    out, width = torch.empty_like(x), x.shape[-1]
    kernel(out.data_ptr(), *pointers, x.numel() // width, width, eps, _DTYPE_CODES[x.dtype])
    return out
