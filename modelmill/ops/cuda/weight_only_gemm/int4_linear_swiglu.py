"""Fused SwiGLU with int4 weights: a warp has eight gate rows and the matching up rows."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.weight_only_gemm.int4_linear import available as available
from modelmill.ops.cuda.weight_only_gemm.int4_linear import int4_gemm
from modelmill.ops.cuda.weight_only_gemm.int4_linear import supports as supports


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; sums in float32."""
    return int4_gemm(x, weight, scale, offset, group, bias, gated=True)
