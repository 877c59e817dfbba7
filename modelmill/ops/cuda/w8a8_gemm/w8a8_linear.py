"""Int8 W8A8 linear for many rows on Hopper (gemm_8bit.cu).

Few rows are served by Triton.
"""

from __future__ import annotations

import torch

from modelmill.ops.cuda.w8a8_gemm import gemm_8bit
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import run as run
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import supports as supports
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import unavailable_reason as unavailable_reason
from modelmill.ops.kernel_support import UNBOUNDED

MAX_ROWS_LEFT_TO_TRITON = 16  # rows up to which it is not worth it


SUPPORTED_PROBLEMS = (gemm_8bit.gemm_support_range((MAX_ROWS_LEFT_TO_TRITON + 1, UNBOUNDED)),)


def warmup_sizes(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """Numbers of rows up to ``max_rows`` that cover every kernel config of this op."""
    return gemm_8bit.warmup_sizes(x, weight, MAX_ROWS_LEFT_TO_TRITON, max_rows)
