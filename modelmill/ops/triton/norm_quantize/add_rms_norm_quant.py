"""Residual add and RMSNorm with an 8-bit output (norm_quant); the sum overwrites the residual."""

from __future__ import annotations

from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.norm_quantize.norm_quant import SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS
from modelmill.ops.triton.norm_quantize.norm_quant import rms_norm_quant
from modelmill.ops.triton.norm_quantize.norm_quant import supports as supports

run = rms_norm_quant
