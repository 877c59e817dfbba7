"""16-bit linear of prompts added to the residual by cuBLAS (addmm), rounded once.

Computes: residual[M, N] += x[M, K] · weight[N, K]ᵀ
Dtypes: bfloat16 or float16
Layout: row-major, residual contiguous
Range: M ≥ 512; no bias
Technique: cuBLAS through torch (addmm)
Ops: linear_add

A kernel of our own (gemm_swiglu_large_m.cu with the sum in its store) was no faster than cuBLAS,
and is not here.
"""

from __future__ import annotations

import torch

from modelmill.ops.cuda.gemm_16bit.linear import unavailable_reason as unavailable_reason
from modelmill.ops.kernel_support import HALF_DTYPES, UNBOUNDED, GemmSupportRange

# fewer rows are other kernels' work, and the norm behind adds for nothing
SUPPORTED_PROBLEMS = (GemmSupportRange(m=(512, UNBOUNDED), dtypes=HALF_DTYPES, bias=False),)


def supports(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """All of one dtype on a GPU, the residual packed."""
    alike = x.dtype == weight.dtype == residual.dtype
    return alike and x.is_cuda and residual.is_contiguous()


def run(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the reference, rounded once instead of twice."""
    assert bias is None, "see SUPPORTED_PROBLEMS"
    return residual.addmm_(x, weight.t())
