"""Products of many rows in fp8 on Hopper (products8.cu); few rows, or activations as they are, are Triton's work.

So are thousands of rows where torch has a product for them, which is faster there: SAM's ViT-H in fp8 took 9.45 ms with
this one and 8.98 with torch's, eight pictures 72.2 and 63.0.
"""

from __future__ import annotations

import torch

from modelmill.ops.cuda import products8
from modelmill.ops.cuda.products8 import available as available

FEW = 16  # rows up to which it is not worth it
THOUSANDS = 2048  # rows from which torch's is taken


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """As ``products8.supports``, more than a few rows of fp8."""
    if x_scale is None or x.shape[0] <= FEW:
        return False
    if x.shape[0] >= THOUSANDS and dtype == torch.bfloat16 and not (weight.shape[0] | weight.shape[1]) % 16:
        return False
    return products8.supports(x, weight, scale, x_scale, dtype, bias)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, but that tensor cores keep fewer bits of the sums than float32 has."""
    assert x_scale is not None, "as supports says"
    return products8.run(x, weight, scale, x_scale, dtype, bias)


def forms(x: torch.Tensor, weight: torch.Tensor, most: int) -> list[int]:
    """Numbers of rows, up to ``most``, with which every form of the kernel is met that such a product may take."""
    most = most if (weight.shape[0] | weight.shape[1]) % 16 else min(most, THOUSANDS - 1)
    return products8.forms(x, weight, FEW, most)
