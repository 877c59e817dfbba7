"""Residual add and RMSNorm by rows in C++ (add_rms_norm.cpp).

The sum overwrites the residual.
"""

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


def supports(x: torch.Tensor, residual: torch.Tensor, *_: object) -> bool:  # noqa: ARG001
    """Whether the residual, which is overwritten, is contiguous."""
    return residual.is_contiguous()


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; the sum overwrites ``residual``."""
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
        _DTYPES[x.dtype],
    )
    return out, residual


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("add_rms_norm", "ppppqqdi")
