"""SwiGLU's gate by rows in C++ (silu_mul.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.silu_mul import silu_mul

available = build.available
_DTYPES = build.DTYPES


def run(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference, which also serves other than two dimensions."""
    dtype = gate_up.dtype
    if dtype not in _DTYPES or gate_up.dim() != 2:
        return silu_mul(gate_up)
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    inner = width // 2
    out = torch.empty(rows, inner, dtype=dtype)
    _kernel()(out.data_ptr(), gate_up.data_ptr(), rows, inner, _DTYPES[dtype])
    return out


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("silu_mul", "ppqqi")
