"""Residual add and RMSNorm by rows in C++ (add_rms_norm.cpp).

The sum overwrites the residual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.add_rms_norm import add_rms_norm
from modelmill.ops.cpu.common import build

available = build.available
_DTYPES = build.DTYPES


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, which also serves mixed dtypes and a strided residual."""
    dtype = x.dtype
    if (
        dtype not in _DTYPES
        or not residual.is_contiguous()
        or not (residual.dtype is weight.dtype is dtype)
    ):
        return add_rms_norm(x, residual, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    width = weight.numel()
    _kernel()(
        out.data_ptr(),
        residual.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        x.numel() // width,
        width,
        eps,
        _DTYPES[dtype],
    )
    return out, residual


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("add_rms_norm", "ppppqqdi")
