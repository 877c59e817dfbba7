"""RMSNorm by rows in C++ (rms_norm.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.rms_norm import rms_norm

available = build.available
_DTYPES = build.DTYPES


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference; mixed dtypes are the reference's."""
    dtype = x.dtype
    if dtype not in _DTYPES or weight.dtype is not dtype:
        return rms_norm(x, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    width = weight.numel()
    _kernel()(
        out.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        x.numel() // width,
        width,
        eps,
        _DTYPES[dtype],
    )
    return out


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("rms_norm", "pppqqdi")
