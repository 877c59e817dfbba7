"""Residual add and RMSNorm to 8 bits in another order of columns; all else is Triton's."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.common.build import unavailable_reason as unavailable_reason
from modelmill.ops.cuda.norm_quantize import rmsnorm_quant_permute
from modelmill.ops.cuda.norm_quantize.rmsnorm_quant_permute import (
    SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS,
)
from modelmill.ops.quant_types import ActQuantSpec


def supports(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, spec: ActQuantSpec
) -> bool:
    """As ``rmsnorm_quant_permute.supports``; the residual lies in memory as x does."""
    packed = residual.is_contiguous() and residual.data_ptr() % 16 == 0
    return packed and rmsnorm_quant_permute.supports(x, weight, eps, spec)


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, spec: ActQuantSpec
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """As the reference; the sum is written over ``residual``."""
    values, scale = rmsnorm_quant_permute.rms_norm_quant(x, residual, weight, eps, spec)
    return values, scale, residual
