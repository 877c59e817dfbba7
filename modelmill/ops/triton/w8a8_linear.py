"""Products of int8 with int8 on the tensor cores; one token by four-byte products."""

from __future__ import annotations

import torch

from modelmill.ops.triton import sizes
from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.products8 import tile8, vector8, words
from modelmill.ops.triton.sizes import Chosen, Key, Sizes
from modelmill.ops.triton.sizes import key_of as key_of


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """Any number of rows; rows of x and weight contiguous, scales float32 and packed."""
    if x.dim() != 2 or not x.numel() or not weight.numel() or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    floats = all(s.dtype == torch.float32 and s.is_contiguous() for s in (scale, x_scale))
    return floats and x.dtype == weight.dtype == torch.int8 and dtype != torch.float64


def candidates(key: Key) -> tuple[Sizes, ...]:
    """The launch sizes that may be chosen for a product."""
    return sizes.candidates8(key)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    chosen: Chosen | None = None,
) -> torch.Tensor:
    """As the reference. chosen: launch sizes for this device; the rest have defaults."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    if words(x, weight):
        vector8(x, weight, scale, x_scale, bias, out, chosen)
    else:
        tile8(x, weight, scale, x_scale, bias, out, chosen)
    return out
