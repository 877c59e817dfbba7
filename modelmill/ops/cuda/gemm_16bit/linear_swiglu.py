"""Fused 16-bit SwiGLU by TMA and wgmma, for a few rows and for prompts."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.gemm_16bit import gemm
from modelmill.ops.cuda.gemm_16bit.linear import available as available

specializations = gemm.large_m_specializations


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """16 bits, matrices that TMA can read; as many rows as either kernel serves."""
    if weight.shape[0] % 4 or x.dim() != 2:
        return False
    return gemm.supports_small_m(x, weight, bias) or gemm.supports_large_m(x, weight, bias)


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, sums in float32, the products rounded before the gate."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    if x.shape[0] <= gemm.SMALL_M_MAX_ROWS:
        gemm.gemm_small_m(x, weight, bias, out)
    else:
        gemm.gemm_swiglu_large_m(x, weight, bias, out)
    return out
