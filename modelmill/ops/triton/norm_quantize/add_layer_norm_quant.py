"""Residual add and LayerNorm with an 8-bit output."""

from __future__ import annotations

import torch

from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.norm_quantize.layer_norm_quant import layer_norm_quant, supports_rows


def supports(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    dtype: torch.dtype, inv_scale: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """As ``layer_norm_quant.supports_rows``; x and residual have one shape and dtype."""
    return (
        x.dtype == residual.dtype
        and x.shape == residual.shape
        and supports_rows(x, dtype, inv_scale)
    )


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    dtype: torch.dtype, inv_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """Compute the op with the Triton kernel; same contract as the reference."""
    return layer_norm_quant(x, residual, weight, bias, eps, dtype, inv_scale)
