"""GELU's tanh form in C++ (gelu_tanh.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.gelu_tanh import gelu_tanh

available = build.available
_DTYPES = build.DTYPES


def run(x: torch.Tensor) -> torch.Tensor:
    """Compute the op on the CPU; same contract as the reference."""
    dtype = x.dtype
    if dtype not in _DTYPES:
        return gelu_tanh(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    _kernel()(out.data_ptr(), x.data_ptr(), x.numel(), _DTYPES[dtype])
    return out


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("gelu_tanh", "ppqi")
