"""LayerNorm by rows in C++ (layer_norm.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.row_range import RowRange

available = build.available
_DTYPES = build.DTYPES
SUPPORTED_PROBLEMS = (RowRange(dtypes=tuple(_DTYPES), same_dtype=True),)


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    out = torch.empty_like(x)
    width = weight.numel()
    rows = x.numel() // width
    _kernel()(
        out.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        rows,
        width,
        eps,
        _DTYPES[x.dtype],
    )
    return out


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("layer_norm", "ppppqqdi")
