"""Residual add and RMSNorm with an 8-bit output, in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops import rms_norm_quant
from modelmill.ops.add_rms_norm import add_rms_norm
from modelmill.ops.case import Case, nbytes, randn

TOLERANCE = rms_norm_quant.TOLERANCE


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    bits: int = 8,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(values, scale or None, x + residual): ``rms_norm_quant`` of the sum, which is rounded to x's
    dtype first.

    x, residual: [..., H], same dtype; the residual stream keeps its order. Variants may reuse the
    residual's memory for the sum.
    """
    y, total = add_rms_norm(x, residual, weight, eps)
    return *rms_norm_quant.quantize_rows(y, dtype, inv_scale, zero_point, perm, bits), total


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The cases of rms_norm_quant, with a residual of ten times the branch's scale."""
    for case in rms_norm_quant.cases(device, dtype):
        x = case.args["x"]
        residual = randn(*x.shape, device=device, dtype=dtype, seed=sum(x.shape), scale=10.0)
        moved = case.bytes_moved + 2 * nbytes(x)
        yield Case(case.name, case.args | {"residual": residual}, moved, writes=("residual",))
