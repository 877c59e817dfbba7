"""Activations to clustered integers in C++ (clustered_linear.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cluster_quant import cluster_quant
from modelmill.ops.cpu import build

available = build.available
_DTYPES = build.DTYPES


def run(
    x: torch.Tensor,
    order: torch.Tensor,
    factor: torch.Tensor | None,
    zero: torch.Tensor | None,
    bits: int,
    group: int,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference."""
    kinds = ((order, torch.int32), (factor, torch.float32), (zero, torch.int32))
    fits = all(t is None or (t.is_contiguous() and t.dtype is kind) for t, kind in kinds)
    if not fits or x.dtype not in _DTYPES or x.dim() != 2 or (factor is not None and factor.numel() != order.numel()):
        return cluster_quant(x, order, factor, zero, bits, group, gated)
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    columns = order.numel()
    q = torch.empty(rows, columns, dtype=torch.int8)
    step = None if factor is not None else torch.empty(rows, columns // group)
    pointers = [None if t is None else t.data_ptr() for t in (q, step, x, order, factor, zero)]
    _kernel()(*pointers, rows, width, columns, group, bits, gated, _DTYPES[x.dtype])
    return q, step


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("cluster_quant", "ppppppqqqqiii")
