"""Residual add and LayerNorm: two reads and two writes per value."""

from __future__ import annotations

import torch

from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.norm_quantize.layer_norm_quant import (
    SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS,
)
from modelmill.ops.triton.norm_quantize.layer_norm_quant import layer_norm_quant


def run(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op with the Triton kernel; same contract as the reference."""
    out, _, total = layer_norm_quant(x, residual, weight, bias, eps)
    return out, total
