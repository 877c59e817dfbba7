"""A gated pair of products of many rows in 8 bits on Hopper, and its gate (products8.cu)."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import products8
from modelmill.ops.cuda.products8 import available as available

FEW = 64  # rows up to which a kernel of its own for the gate is no slower


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """As ``products8.supports``, more than a few rows, halves in eights."""
    return x.shape[0] > FEW and weight.shape[0] % 16 == 0 and products8.supports(x, weight, scale, x_scale, dtype, bias)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, rounded once after the gate."""
    return products8.run(x, weight, scale, x_scale, dtype, bias, gated=True)


def forms(x: torch.Tensor, weight: torch.Tensor, most: int) -> list[int]:
    """Numbers of rows, up to ``most``, with which every form of the kernel is met that such a product may take."""
    return products8.forms(x, weight, FEW, most, gated=True)
