"""Products with group-wise weights: what is common to all code widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from modelmill.ops.groupwise import PACK_COLUMNS, GroupwiseLinearInputs
from modelmill.ops.kernel_range import Kernel, ProblemRange
from modelmill.ops.triton.common.device import DEQUANT_RANGES
from modelmill.ops.triton.weight_only_gemm.dequant import multiply_dequantized

SUPPORTED_PROBLEMS = tuple(replace(each, group_multiple=PACK_COLUMNS) for each in DEQUANT_RANGES)


def supports(inputs: GroupwiseLinearInputs) -> bool:
    """Contiguous rows of x, weight and grids."""
    x, weight, scale, offset = inputs[:4]
    if not x.shape[1] or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    return scale.stride(1) == 1 and (offset is None or offset.stride() == scale.stride())


def kernels(
    max_rows: int,
    gemm: Callable[[GroupwiseLinearInputs], torch.Tensor],
    dequantize: Callable[[GroupwiseLinearInputs], torch.Tensor],
) -> tuple[Kernel, ...]:
    """``gemm`` up to ``max_rows`` rows; cuBLAS with the dequantized weight for more."""

    def multiply(inputs: GroupwiseLinearInputs) -> torch.Tensor:
        return multiply_dequantized(inputs, dequantize(inputs))

    return (Kernel(ProblemRange(m=(1, max_rows)), gemm), Kernel(ProblemRange(), multiply))
