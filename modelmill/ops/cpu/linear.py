"""Dense products of a few rows in C++ (linear.cpp), bound by the weights' bandwidth; torch's GEMM serves more rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from modelmill.ops.cpu import build

available = build.available
_DTYPES = build.DTYPES
# Rows up to which streaming the weights once beats a blocked product.
MOST_ROWS = 8


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference."""
    dtype = x.dtype
    if x.dim() != 2 or len(x) > MOST_ROWS or weight.dtype is not dtype or dtype not in _DTYPES:
        return F.linear(x, weight, bias)
    if not weight.is_contiguous() or (bias is not None and not (bias.is_contiguous() and bias.dtype is dtype)):
        return F.linear(x, weight, bias)
    x = x.contiguous()
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty((rows, n), dtype=dtype)
    added = None if bias is None else bias.data_ptr()
    _kernel()(out.data_ptr(), x.data_ptr(), weight.data_ptr(), added, rows, k, n, _DTYPES[dtype])
    return out


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("linear", "ppppqqqi")
