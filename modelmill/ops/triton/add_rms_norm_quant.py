"""Residual add and RMSNorm to 8 bits (norm_quant); the sum is stored over the residual."""

from __future__ import annotations

import torch

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.norm_quant import fits, norm


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
    """As ``norm_quant.fits``, x and residual of one shape and dtype."""
    return x.dtype == residual.dtype and x.shape == residual.shape and fits(x, weight, kind, (factor, zero, order))


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
    """As the reference; the sum is written over ``residual`` where that is contiguous."""
    return norm(x, residual, weight, eps, kind, (factor, zero, order), bits)
