"""Cases of weight-only products on the CPU, for emulated kernels, and their operands."""

from __future__ import annotations

from typing import NamedTuple

import torch

from modelmill.ops import int4_linear, int8_group_linear
from modelmill.ops.groupwise import GroupwiseLinearInputs

ONE_GROUP = 1 << 20  # a group size above all rows


class GemmCase(NamedTuple):
    """size: tokens, rows and columns of the weight. grids: dtype of its scales and offsets."""

    size: tuple[int, int, int]
    group: int
    dtype: torch.dtype
    bits: int = 4
    grids: torch.dtype = torch.float16
    gated: bool = False
    symmetric: bool = False
    biased: bool = False


def random_operands(
    case: GemmCase, mean: float = 0.0
) -> tuple[GroupwiseLinearInputs, torch.Tensor]:
    """The operands, and the weight in float64.

    mean: of x, whose rows lie in wider ones that are no numbers.
    """
    tokens, rows, columns = case.size
    op, group = int4_linear if case.bits == 4 else int8_group_linear, min(case.group, columns)
    generator = torch.Generator().manual_seed(rows)
    tensors = op.random_weight(rows, columns, group, device="cpu", symmetric=case.symmetric)
    weight, scale, offset = tensors["weight"], tensors["scale"], tensors["offset"]
    assert weight is not None
    assert scale is not None
    scale, offset = scale.to(case.grids), None if offset is None else offset.to(case.grids)
    x = torch.full((tokens, columns + 24), float("nan")).to(case.dtype)[:, :columns]
    x[:] = torch.randn(tokens, columns, generator=generator) + mean
    x[:, ::37] *= 30
    bias = torch.randn(rows, generator=generator).to(case.dtype) if case.biased else None
    dense = op.dequantize_weight(weight, scale, offset, group, columns, torch.float64)
    return GroupwiseLinearInputs(x, weight, scale, offset, case.group, bias), dense
