"""RMSNorm to 8 bits in another order of columns (norm_order.cu); all else is Triton's."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import norm_order
from modelmill.ops.cuda.build import available as available


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kind: torch.dtype,
    factor: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    bits: int = 8,
) -> bool:
    """As ``norm_order.fits``."""
    return norm_order.fits(x, weight, kind, (factor, zero, order))


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    kind: torch.dtype,
    factor: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    bits: int = 8,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference."""
    return norm_order.norm(x, None, weight, eps, kind, (factor, zero, order), bits)
