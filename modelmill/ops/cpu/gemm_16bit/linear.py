"""Dense products in C++ (linear.cpp).

Every number of rows is served here, and a row gives the same bits alone and in a batch; but in
bfloat16 torch's product is faster from 17 rows on where the processor multiplies matrices
(``build.torch_gemm_is_faster``).
"""

from __future__ import annotations

import functools

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import GemmFunction
from modelmill.ops.linear import AMX_K_ALIGNMENT, linear

unavailable_reason = build.unavailable_reason
_gemm = GemmFunction("linear", "ppppqqqi")


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, which also serves other dimensions, mixed dtypes and weights with gaps."""
    dtype = x.dtype
    if (
        dtype not in build.DTYPE_CODES
        or x.dim() != 2
        or weight.dtype is not dtype
        or not weight.is_contiguous()
    ):
        return linear(x, weight, bias)
    rows, k = x.shape
    if not prefers_cpp_kernel(dtype, rows, k) or (
        bias is not None and not (bias.is_contiguous() and bias.dtype is dtype)
    ):
        return linear(x, weight, bias)
    return _gemm((x.contiguous(), weight, bias), (rows, k, weight.shape[0]), dtype)


def prefers_cpp_kernel(dtype: torch.dtype, rows: int, k: int) -> bool:
    """Whether a product of so many rows of K columns is better done here than by torch.

    Of rows that torch would read beyond their ends (``ops.linear``) always.
    """
    return rows <= max_cpp_kernel_rows(dtype) or (dtype.itemsize == 2 and k % AMX_K_ALIGNMENT != 0)


@functools.cache
def max_cpp_kernel_rows(dtype: torch.dtype) -> int:
    """Rows up to which these kernels beat torch's product."""
    library = build.load_or_compile_library()
    narrow = isinstance(library, str) or library.vector_width < 8
    return (
        build.SMALL_M_LIMIT
        if narrow or (dtype is torch.bfloat16 and build.torch_gemm_is_faster())
        else 1 << 62
    )
