"""Supported arguments of products with group-wise weights, common to all code widths."""

from __future__ import annotations

from dataclasses import replace

from modelmill.ops.groupwise import PACK_COLUMNS, GroupwiseLinearInputs
from modelmill.ops.triton.common.device import DEQUANT_RANGES

SUPPORTED_PROBLEMS = tuple(replace(each, group_multiple=PACK_COLUMNS) for each in DEQUANT_RANGES)


def supports(inputs: GroupwiseLinearInputs) -> bool:
    """Contiguous rows of x, weight and grids."""
    x, weight, scale, offset = inputs[:4]
    if not x.shape[1] or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    return scale.stride(1) == 1 and (offset is None or offset.stride() == scale.stride())
