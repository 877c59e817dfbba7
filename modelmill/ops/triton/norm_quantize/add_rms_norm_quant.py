"""Residual add and RMSNorm with an 8-bit output (norm_quant); the sum overwrites the residual."""

from __future__ import annotations

import torch

from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.norm_quantize.norm_quant import rms_norm_quant, supports_rows


def supports(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    bits: int = 8,
) -> bool:
    """As ``norm_quant.supports_rows``; x and residual of one shape and dtype."""
    return (
        x.dtype == residual.dtype
        and x.shape == residual.shape
        and supports_rows(x, weight, dtype, (inv_scale, zero_point, perm))
    )


def run(
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
    """Run the op; the sum overwrites ``residual`` if that is contiguous."""
    return rms_norm_quant(x, residual, weight, eps, dtype, (inv_scale, zero_point, perm), bits)
