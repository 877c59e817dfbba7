"""Products with int8 weights: converted in registers on the way to the multiply, scaled once at the end.

From MANY rows on the weight is written out in x's type, and cuBLAS multiplies (written.py).
"""

from __future__ import annotations

import torch

from modelmill.ops.triton import sizes
from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import widens_for
from modelmill.ops.triton.linear import tile, vector
from modelmill.ops.triton.sizes import Chosen, Key, Sizes
from modelmill.ops.triton.sizes import key_of as key_of
from modelmill.ops.triton.written import product, written

MANY = 257


def supports(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Any number of rows in 16 bit, up to 16 in float32; rows of x and weight contiguous."""
    if x.dim() != 2 or x.shape[0] == 0 or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    return widens_for(x)


def candidates(key: Key) -> tuple[Sizes, ...]:
    """The launch sizes that may be chosen for a product."""
    return sizes.candidates(key, 1)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    chosen: Chosen | None = None,
) -> torch.Tensor:
    """As the reference, sums in float32: the integers in x's dtype, then scale and bias; of MANY rows scaled first."""
    if x.shape[0] >= MANY:
        return product(x, written(weight, scale, None, x.shape[1], x.shape[1], x.dtype), bias)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if x.shape[0] == 1:
        vector(x, weight, scale, bias, out, chosen)
    else:
        tile(x, weight, scale, bias, out, chosen)
    return out
