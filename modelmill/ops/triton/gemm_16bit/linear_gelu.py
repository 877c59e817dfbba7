"""Matrix product with many rows and GELU in the epilogue: cuBLASLt's, through torch.

Computes: out[M, N] = gelu_tanh(x[M, K] · weight[N, K]ᵀ + bias[N])
Dtypes: bfloat16 or float16
Layout: row-major
Range: M ≥ 64; with bias
Technique: cuBLASLt epilogue through torch
Ops: linear_gelu
"""

from __future__ import annotations

import torch

from modelmill.ops.kernel_support import HALF_DTYPES, UNBOUNDED, GemmSupportRange
from modelmill.ops.triton.common.device import unavailable_reason_for_portable_kernel

unavailable_reason = unavailable_reason_for_portable_kernel

# rows from which cuBLASLt's epilogue is faster; 16 bits, as its GELU is the tanh approximation
SUPPORTED_PROBLEMS = (GemmSupportRange(m=(64, UNBOUNDED), dtypes=HALF_DTYPES, bias=True),)


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """All of one dtype on a GPU; contiguous rows of x."""
    alike = bias is not None and x.dtype == weight.dtype == bias.dtype
    return alike and x.is_cuda and x.stride(1) == 1 and weight.is_contiguous()


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Run the op; GELU is applied to the unrounded sum."""
    assert bias is not None, "linear_gelu needs a bias here (see SUPPORTED_PROBLEMS)"
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
