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

from modelmill.ops.triton.common.device import available as available

MIN_ROWS = 64  # rows from which cuBLASLt's epilogue is faster


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """16 bits (its GELU is the tanh approximation), many rows, with a bias."""
    if (
        not x.is_cuda
        or x.dtype not in (torch.bfloat16, torch.float16)
        or bias is None
        or x.dim() != 2
    ):
        return False
    return (
        x.shape[0] >= MIN_ROWS
        and x.stride(1) == 1
        and weight.is_contiguous()
        and x.dtype == weight.dtype == bias.dtype
    )


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Run the op; GELU is applied to the unrounded sum."""
    assert bias is not None, "linear_gelu needs a bias here (see supports)"
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
