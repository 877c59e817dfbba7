"""LayerNorm by rows in C++ (layer_norm.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.layer_norm import layer_norm

available = build.available
_DTYPES = build.DTYPES


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference; mixed dtypes are the reference's."""
    dtype = x.dtype
    if dtype not in _DTYPES or not (weight.dtype is bias.dtype is dtype):
        return layer_norm(x, weight, bias, eps)
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
        _DTYPES[dtype],
    )
    return out


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("layer_norm", "ppppqqdi")
