"""RMSNorm with an 8-bit output (norm_quant)."""

from __future__ import annotations

import torch

from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.norm_quantize.norm_quant import SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS
from modelmill.ops.triton.norm_quantize.norm_quant import rms_norm_quant
from modelmill.ops.triton.norm_quantize.norm_quant import supports as supports


def run(
    x: torch.Tensor, weight: torch.Tensor, eps: float, spec: ActQuantSpec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the op with the Triton kernel; same contract as the reference."""
    return rms_norm_quant(x, None, weight, eps, spec)[:2]
