"""Activations to 8 bits (norm_quant, without its norm)."""

from __future__ import annotations

import torch

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.norm_quant import fits, norm


def supports(
    x: torch.Tensor,
    kind: torch.dtype,
    factor: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    bits: int = 8,
) -> bool:
    """As ``norm_quant.fits``."""
    return fits(x, None, kind, (factor, zero, order))


def run(
    x: torch.Tensor,
    kind: torch.dtype,
    factor: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    bits: int = 8,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference."""
    values, scale, _ = norm(x, None, None, 0.0, kind, (factor, zero, order), bits)
    return values, scale
