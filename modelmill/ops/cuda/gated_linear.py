"""The gated pair of products by Hopper's copy engine and tensor cores, for a few rows and for prompts."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import products
from modelmill.ops.cuda.linear import available as available

forms = products.many_forms


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """16 bits, matrices that the copy engine can read; as many rows as either kernel serves."""
    if weight.shape[0] % 4 or x.dim() != 2:
        return False
    return products.few_serves(x, weight, bias) or products.many_serves(x, weight, bias)


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, sums in float32, the products rounded before the gate."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    if x.shape[0] <= products.MOST_ROWS:
        products.few(x, weight, bias, out)
    else:
        products.many(x, weight, bias, out)
    return out
