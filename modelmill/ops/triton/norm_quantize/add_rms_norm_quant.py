"""Residual add and RMSNorm with an 8-bit output (norm_quant); the sum overwrites the residual."""

from __future__ import annotations

import torch

from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.norm_quantize.norm_quant import rms_norm_quant, supports_rows


def supports(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, spec: ActQuantSpec
) -> bool:
    """As ``norm_quant.supports_rows``; x and residual of one shape and dtype."""
    alike = x.dtype == residual.dtype and x.shape == residual.shape
    return alike and supports_rows(x, weight, spec)


run = rms_norm_quant
