"""LayerNorm by rows in C++ (layer_norm.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.norm_quantize.rms_norm import SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS
from modelmill.ops.cpu.norm_quantize.rms_norm import run_row_kernel

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("layer_norm", "ppppqqdi")


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    return run_row_kernel(_kernel(), x, (x.data_ptr(), weight.data_ptr(), bias.data_ptr()), eps)
