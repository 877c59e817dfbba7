"""Many rows times a weight, GELU in the product's epilogue: cuBLASLt's, through torch."""

from __future__ import annotations

import torch

from modelmill.ops.triton.device import available as available

MIN_ROWS = 64  # rows from which cuBLASLt's epilogue is worth it


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """16 bits (its GELU is the tanh form), many rows, a bias."""
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
    """As the reference, of the sum that is not rounded."""
    assert bias is not None, "supports() asks for one"
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
