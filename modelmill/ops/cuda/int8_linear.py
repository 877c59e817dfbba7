"""Products of one row with int8 weights through the tensor cores (one_row.cu)."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import build, one_row


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles the commonest form, once a machine."""
    common = one_row.Kind(8, integer=False, offset=False, wide=True)
    plan = one_row.planned(common, (4096, 4096), 4096, 1, torch.bfloat16, gated=False)
    return build.serves(kind, "one_row", plan.macros)


def supports(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """One row in 16 bits, K a multiple of 32, N of 16, everything packed."""
    if x.dim() != 2 or x.dtype.itemsize != 2 or not x.is_cuda or not scale.is_contiguous():
        return False
    if scale.dtype is not torch.float32 or not (bias is None or (bias.dtype == x.dtype and bias.is_contiguous())):
        return False
    return one_row.serves(x, weight, one_row.kind_of(x, weight, scale, None, x.shape[1]), x.shape[1], 1)


def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference: the integers in x's dtype, sums, scale and bias in float32."""
    return one_row.product(x, weight, (scale, None, x.shape[1]), (None, None, bias), x.dtype)
