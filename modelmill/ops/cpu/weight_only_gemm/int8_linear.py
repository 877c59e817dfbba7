"""Products with int8 weights in C++ (int8_linear.cpp). Activations stay as they are.

The integers become floats in registers, so that only a byte a weight comes from memory. Many rows
of bfloat16: exact bfloat16 copies of a slice of the weights, then torch's blocked product.
"""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import GemmFunction, load_gemm_function
from modelmill.ops.cpu.gemm_16bit.linear import prefers_cpp_kernel
from modelmill.ops.int8_linear import int8_linear

unavailable_reason = build.unavailable_reason
_DTYPE_CODES = build.DTYPE_CODES
_gemm = GemmFunction("int8_linear", "pppppqqqi")
# Weights widened at a time: the copies stay in the cache until the product has read them.
DEQUANT_SLICE_BYTES = 4 << 20


def run(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the reference, but few rows in 16 bits keep float sums until one final rounding."""
    dtype = x.dtype
    if dtype not in _DTYPE_CODES or x.dim() != 2 or not _supports_weight(weight, scale):
        return int8_linear(x, weight, scale, bias)
    if bias is not None and not (bias.is_contiguous() and bias.dtype is dtype):
        return int8_linear(x, weight, scale, bias)
    x = x.contiguous()
    rows, k = x.shape
    if not prefers_cpp_kernel(dtype, rows, k):
        return _dequantized_matmul(x, weight, scale, bias)
    return _gemm((x, weight, scale, bias), (rows, k, weight.shape[0]), dtype)


def _supports_weight(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    return (
        weight.dtype is torch.int8
        and scale.dtype is torch.float32
        and weight.is_contiguous()
        and scale.is_contiguous()
    )


def _dequantized_matmul(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """X [T, K] times slices of the widened weight; the scale is applied in place at the end."""
    n, k = weight.shape
    code = _DTYPE_CODES[x.dtype]
    step = min(n, max(256, DEQUANT_SLICE_BYTES // max(k, 1)))
    widen = load_gemm_function("int8_dequant", "ppqi")
    wide = torch.empty(step, k, dtype=x.dtype)
    out = torch.empty(x.shape[0], n, dtype=x.dtype)
    for first in range(0, n, step):
        count = min(step, n - first)
        widen(wide.data_ptr(), weight.data_ptr() + first * k, count * k, code)
        torch.mm(x, wide[:count].t(), out=out[:, first : first + count])
    added = None if bias is None else bias.data_ptr()
    load_gemm_function("int8_epilogue", "pppqqi")(
        out.data_ptr(), scale.data_ptr(), added, x.shape[0], n, code
    )
    return out
