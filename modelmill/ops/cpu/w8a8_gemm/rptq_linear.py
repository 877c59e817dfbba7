"""RPTQ integer linear in C++ (rptq_linear.cpp): AVX-512 VNNI or portable integers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.rptq_linear import RptqLinearInputs, rptq_linear

available = build.available
_DTYPES = build.DTYPES
_MAX_GROUP = 1 << 16  # columns whose sum of 255 · 128 stays below 2³¹


def run(inputs: RptqLinearInputs) -> torch.Tensor:
    """Compute the op on the CPU; same contract as the reference."""
    q, weight, scale, offset, group, step, constant, bias, dtype = inputs
    grids = [t for t in (scale, offset) if t is not None]
    packed = weight.dtype is torch.uint8
    operands = (q, weight, step, *grids, *(t for t in (constant, bias) if t is not None))
    fits = (
        all(t.is_contiguous() for t in operands)
        and group % 32 == 0
        and group <= _MAX_GROUP
        and q.dim() == 2
    )
    fits = fits and all(
        t.dtype is scale.dtype and t.dtype in (torch.float16, torch.float32) for t in grids
    )
    fits = (
        fits
        and step.dtype is torch.float32
        and (constant is None or constant.dtype is torch.float32)
    )
    if not fits or dtype not in _DTYPES or (bias is not None and bias.dtype is not dtype):
        return rptq_linear(inputs)
    rows, columns = q.shape
    n = weight.shape[0]
    out = torch.empty(rows, n, dtype=dtype)
    pointers = [
        None if t is None else t.data_ptr()
        for t in (out, q, weight, scale, offset, step, constant, bias)
    ]
    kernel = _kernel() if rows <= build.SMALL_M_LIMIT else _kernel_without_gil()
    flags = (_DTYPES[dtype], scale.dtype is torch.float16, packed, step.dim() == 2)
    kernel(*pointers, rows, columns, n, group, *flags)
    return out


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("rptq_linear", "ppppppppqqqqiiii")


@functools.cache
def _kernel_without_gil() -> Callable[..., Any]:
    return build.function("rptq_linear", "ppppppppqqqqiiii", release_gil=True)
