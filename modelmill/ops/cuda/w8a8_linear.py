"""Products of many rows of int8 activations with int8 weights on Hopper (products8.cu); few rows are Triton's work."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import products8
from modelmill.ops.cuda.products8 import available as available
from modelmill.ops.cuda.products8 import run as run

FEW = 16  # rows up to which it is not worth it


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """As ``products8.supports``, more than a few rows."""
    return x.shape[0] > FEW and products8.supports(x, weight, scale, x_scale, dtype, bias)


def forms(x: torch.Tensor, weight: torch.Tensor, most: int) -> list[int]:
    """Numbers of rows, up to ``most``, with which every form of the kernel is met that such a product may take."""
    return products8.forms(x, weight, FEW, most)
