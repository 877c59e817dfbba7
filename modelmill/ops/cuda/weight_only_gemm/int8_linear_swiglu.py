"""Fused SwiGLU of a few rows with int8 weights: a warp has gate rows and matching up rows."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m
from modelmill.ops.cuda.weight_only_gemm.int8_linear import available as available
from modelmill.ops.cuda.weight_only_gemm.int8_linear import supports as supports


def run(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the reference: the integers in x's dtype, sums, scale and bias in float32."""
    return int8_gemm_small_m.int8_gemm(x, weight, (scale, None, x.shape[1]), bias, gated=True)
