"""Residual add and LayerNorm, rounded to 8 bits at the store."""

from __future__ import annotations

import torch

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.layer_norms import fits, norm


def supports(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    kind: torch.dtype, factor: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """As ``layer_norms.fits``, x and residual alike."""
    return x.dtype == residual.dtype and x.shape == residual.shape and fits(x, kind, factor)


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    kind: torch.dtype, factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """As the reference."""
    return norm(x, residual, weight, bias, eps, kind, factor)
