"""Residual add and RMSNorm by rows in C++ (add_rms_norm.cpp).

The sum overwrites the residual.
"""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.norm_quantize.rms_norm import SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS
from modelmill.ops.cpu.norm_quantize.rms_norm import run_row_kernel

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("add_rms_norm", "ppppqqdi")


def supports(x: torch.Tensor, residual: torch.Tensor, *_: object) -> bool:  # noqa: ARG001
    """Whether the residual, which is overwritten, is contiguous."""
    return residual.is_contiguous()


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; the sum overwrites ``residual``."""
    x, weight = x.contiguous(), weight.contiguous()
    pointers = (residual.data_ptr(), x.data_ptr(), weight.data_ptr())
    return run_row_kernel(_kernel(), x, pointers, eps), residual
