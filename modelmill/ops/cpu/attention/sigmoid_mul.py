"""The gate of an attention's output in C++ (sigmoid_mul.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("sigmoid_mul", "pppqqi")


def supports(x: torch.Tensor, gate: torch.Tensor) -> bool:
    """Contiguous values of one dtype."""
    if gate.dtype is not x.dtype or x.dtype not in build.DTYPE_CODES:
        return False
    return x.is_contiguous() and gate.is_contiguous()


def run(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    out = torch.empty_like(x)
    rows, width = x.shape
    _kernel()(
        out.data_ptr(), x.data_ptr(), gate.data_ptr(), rows, width, build.DTYPE_CODES[x.dtype]
    )  # fmt: skip
    return out
