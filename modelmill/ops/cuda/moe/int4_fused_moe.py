"""The experts of a mixture with 4-bit weights, few rows for each (grouped_gemm_wq.cu)."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.moe import grouped_gemm_wq
from modelmill.ops.cuda.moe.grouped_gemm_wq import run as run
from modelmill.ops.cuda.moe.grouped_gemm_wq import supports as supports
from modelmill.ops.cuda.moe.grouped_gemm_wq import unavailable_reason as unavailable_reason
from modelmill.ops.kernel_support import HALF_DTYPES

MIN_TOKENS = 4  # fewer are faster pair by pair, in Triton
SUPPORTED_PROBLEMS = (
    grouped_gemm_wq.moe_support_range(
        MIN_TOKENS, HALF_DTYPES, torch.uint8, torch.float16, offset=True
    ),
)
