"""Gate and up projections with int8 weights for decoding, in one kernel."""

from __future__ import annotations

import torch

from modelmill.ops.kernel_support import HALF_AND_FLOAT64_DTYPES, GemmSupportRange
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.gemm_16bit.linear import MAX_ROWS, gemm
from modelmill.ops.triton.weight_only_gemm.int8_linear import supports as supports

SUPPORTED_PROBLEMS = (
    GemmSupportRange(m=(1, 1)),
    GemmSupportRange(m=(2, MAX_ROWS), dtypes=HALF_AND_FLOAT64_DTYPES),
)


def run(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the op: integers in x's dtype; sums, scale and bias in float32."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    gemm(x, weight, scale, bias, out)
    return out
