"""A gated pair of products of many rows in 8 bits on Hopper, and its gate (gemm_8bit.cu)."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.w8a8_gemm import gemm_8bit
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import supports as supports
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import unavailable_reason as unavailable_reason
from modelmill.ops.kernel_support import UNBOUNDED
from modelmill.ops.w8a8_linear import Linear8BitInputs

MAX_UNFUSED_SWIGLU_ROWS = 64  # rows up to which a kernel of its own for the gate is no slower


# halves in eights
SUPPORTED_PROBLEMS = (
    gemm_8bit.gemm_support_range((MAX_UNFUSED_SWIGLU_ROWS + 1, UNBOUNDED), n_multiple=16),
)


def run(inputs: Linear8BitInputs) -> torch.Tensor:
    """As the reference, rounded once after the gate."""
    return gemm_8bit.run(inputs, gated=True)


def warmup_sizes(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """Numbers of rows up to ``max_rows`` that cover every kernel config of this op."""
    return gemm_8bit.warmup_sizes(x, weight, MAX_UNFUSED_SWIGLU_ROWS, max_rows, gated=True)
