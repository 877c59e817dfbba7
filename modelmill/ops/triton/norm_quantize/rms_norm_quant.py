"""RMSNorm with an 8-bit output (norm_quant)."""

from __future__ import annotations

import torch

from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.norm_quantize.norm_quant import rms_norm_quant, supports_rows


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    bits: int = 8,
) -> bool:
    """Whether the kernel takes these rows; see ``norm_quant.supports_rows``."""
    return supports_rows(x, weight, dtype, (inv_scale, zero_point, perm))


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    bits: int = 8,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the op with the Triton kernel; same contract as the reference."""
    values, scale, _ = rms_norm_quant(
        x, None, weight, eps, dtype, (inv_scale, zero_point, perm), bits
    )
    return values, scale
