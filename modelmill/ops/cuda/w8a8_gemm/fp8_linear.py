"""Fp8 linear for many rows on Hopper (gemm_8bit.cu).

Few rows, or 16-bit activations, are served by Triton.

So are thousands of rows where torch has a product for them, which is faster there: SAM's ViT-H in
fp8 took 9.45 ms with this one and 8.98 with torch's, eight pictures 72.2 and 63.0.

And float32 outputs: tensor cores cut the low bits off each sum of fp8 products, which makes long
sums smaller. Triton's kernel adds up 128 columns at a time in float32, this one all columns.
"""

from __future__ import annotations

import torch

from modelmill.ops.cuda.w8a8_gemm import gemm_8bit
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import run as run
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import supports as supports
from modelmill.ops.cuda.w8a8_gemm.gemm_8bit import unavailable_reason as unavailable_reason
from modelmill.ops.kernel_support import UNBOUNDED, GemmProblem

MAX_ROWS_LEFT_TO_TRITON = 16  # rows up to which it is not worth it
TORCH_MIN_ROWS = 2048  # rows from which torch's is taken
OUT_DTYPES = (torch.bfloat16, torch.float16)


def _unfit_for_torch_scaled_mm(problem: GemmProblem) -> bool:
    """Whether torch has no product of thousands of rows for this weight."""
    return problem.out_dtype != torch.bfloat16 or (problem.n | problem.k) % 16 != 0


# As the reference, but that tensor cores keep fewer bits of the sums than float32 has.
SUPPORTED_PROBLEMS = (
    gemm_8bit.gemm_support_range(
        (MAX_ROWS_LEFT_TO_TRITON + 1, TORCH_MIN_ROWS - 1), out_dtypes=OUT_DTYPES
    ),
    gemm_8bit.gemm_support_range(
        (TORCH_MIN_ROWS, UNBOUNDED), out_dtypes=OUT_DTYPES, fits=_unfit_for_torch_scaled_mm
    ),
)


def warmup_sizes(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """Numbers of rows up to ``max_rows`` that cover every kernel config of this op."""
    max_rows = (
        max_rows if (weight.shape[0] | weight.shape[1]) % 16 else min(max_rows, TORCH_MIN_ROWS - 1)
    )
    return gemm_8bit.warmup_sizes(x, weight, MAX_ROWS_LEFT_TO_TRITON, max_rows)
