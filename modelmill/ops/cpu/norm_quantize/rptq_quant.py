"""Activations to clustered integers in C++ (rptq_linear.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.rptq_quant import RptqQuantInputs, rptq_quant

available = build.available
_DTYPES = build.DTYPES


def run(inputs: RptqQuantInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the op on the CPU; same contract as the reference."""
    x, perm, inv_scale, zero_point, bits, group, gated = inputs
    operands = ((perm, torch.int32), (inv_scale, torch.float32), (zero_point, torch.int32))
    fits = all(t is None or (t.is_contiguous() and t.dtype is dtype) for t, dtype in operands)
    if (
        not fits
        or x.dtype not in _DTYPES
        or x.dim() != 2
        or (inv_scale is not None and inv_scale.numel() != perm.numel())
    ):
        return rptq_quant(inputs)
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    columns = perm.numel()
    q = torch.empty(rows, columns, dtype=torch.int8)
    step = None if inv_scale is not None else torch.empty(rows, columns // group)
    pointers = [
        None if t is None else t.data_ptr() for t in (q, step, x, perm, inv_scale, zero_point)
    ]
    _kernel()(*pointers, rows, width, columns, group, bits, gated, _DTYPES[x.dtype])
    return q, step


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("rptq_quant", "ppppppqqqqiii")
