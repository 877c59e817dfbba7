"""Supported arguments of products with group-wise weights, common to all code widths."""

from __future__ import annotations

import torch

from modelmill.ops.triton.common.device import dequantizes_in_kernel

PACK_COLUMNS = 32  # columns that are packed together; a group size is a multiple of it


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> bool:
    """Any rows in 16 bits, up to 16 in float32; groups of multiples of 32; contiguous rows."""
    if x.dim() != 2 or not x.numel() or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    grids = scale.stride(1) == 1 and (offset is None or offset.stride() == scale.stride())
    return dequantizes_in_kernel(x) and grids and group % PACK_COLUMNS == 0
