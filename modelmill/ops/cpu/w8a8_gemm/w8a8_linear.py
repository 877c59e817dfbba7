"""Int8 by int8 linear in C++ (w8a8_linear.cpp): exact, the same bits on every machine."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import GemmFunction
from modelmill.ops.w8a8_linear import Linear8BitInputs, w8a8_linear

unavailable_reason = build.unavailable_reason
_gemm = GemmFunction("w8a8_linear", "ppppppqqqqi")


def run(inputs: Linear8BitInputs) -> torch.Tensor:
    """As the reference, which also serves other dimensions and memory with gaps."""
    x, weight, scale, x_scale, dtype, bias = inputs
    assert x_scale is not None, "int8 activations have a scale"
    packed = [weight, scale, x_scale] if bias is None else [weight, scale, x_scale, bias]
    floats = scale.dtype is torch.float32 and x_scale.dtype is torch.float32
    if (
        dtype not in build.DTYPE_CODES
        or x.dim() != 2
        or not floats
        or not all(t.is_contiguous() for t in packed)
    ):
        return w8a8_linear(inputs)
    if (
        x.dtype is not torch.int8
        or weight.dtype is not torch.int8
        or (bias is not None and bias.dtype is not dtype)
    ):
        return w8a8_linear(inputs)
    sizes = (*x.shape, weight.shape[0], int(x_scale.numel() > 1))
    return _gemm((x.contiguous(), weight, scale, x_scale, bias), sizes, dtype)
