"""Linear with fp8 weights in C++ (fp8_linear.cpp), converted to float in registers."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import GemmFunction
from modelmill.ops.fp8_linear import FP8_DTYPE, fp8_linear
from modelmill.ops.w8a8_linear import Linear8BitInputs

unavailable_reason = build.unavailable_reason
_gemm = GemmFunction("fp8_linear", "ppppppqqqqi")


def run(inputs: Linear8BitInputs) -> torch.Tensor:
    """As the reference, which also serves other dimensions and memory with gaps."""
    x, weight, scale, x_scale, dtype, bias = inputs
    floats = scale.dtype is torch.float32 and (x_scale is None or x_scale.dtype is torch.float32)
    dtypes_match = (
        x.dtype is (dtype if x_scale is None else FP8_DTYPE) and weight.dtype is FP8_DTYPE
    )
    packed = all(t is None or t.is_contiguous() for t in (weight, scale, x_scale, bias))
    known = dtype in build.DTYPE_CODES and (bias is None or bias.dtype is dtype)
    if not (floats and dtypes_match and packed and known) or x.dim() != 2:
        return fp8_linear(inputs)
    each = int(x_scale is not None and x_scale.numel() > 1)
    sizes = (*x.shape, weight.shape[0], each)
    return _gemm((x.contiguous(), weight, scale, x_scale, bias), sizes, dtype)
