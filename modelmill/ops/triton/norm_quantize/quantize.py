"""Quantization of activations to 8 bits (norm_quant without a norm)."""

from __future__ import annotations

import torch

from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.norm_quantize.norm_quant import QUANTIZE_PROBLEMS, rms_norm_quant
from modelmill.ops.triton.norm_quantize.norm_quant import supports as supports

SUPPORTED_PROBLEMS = QUANTIZE_PROBLEMS


def run(x: torch.Tensor, spec: ActQuantSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the op with the Triton kernel; same contract as the reference."""
    return rms_norm_quant(x, None, None, 0.0, spec)[:2]
