"""Residual add and RMSNorm to 8 bits in another order of columns; all else is Triton's."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import norm_order
from modelmill.ops.cuda.build import available as available


def supports(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kind: torch.dtype,
    factor: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    bits: int = 8,
) -> bool:
    """As ``norm_order.fits``, over a residual like x."""
    alike = residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous()
    return alike and residual.data_ptr() % 16 == 0 and norm_order.fits(x, weight, kind, (factor, zero, order))


def run(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kind: torch.dtype,
    factor: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    bits: int = 8,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """As the reference; the sum is written over ``residual``."""
    values, scale = norm_order.norm(x, residual, weight, eps, kind, (factor, zero, order), bits)
    return values, scale, residual
