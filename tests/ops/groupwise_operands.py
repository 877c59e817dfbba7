"""Operands of weight-only products on the CPU, for emulated kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch

from modelmill.ops.groupwise import GroupwiseLinearInputs


def random_operands(
    size: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    of: ModuleType,
    grids: torch.dtype,
    switches: Mapping[str, bool],
    mean: float = 0.0,
) -> tuple[GroupwiseLinearInputs, torch.Tensor]:
    """The operands, and the weight in float64.

    size: tokens, rows and columns of the weight. of: its op. grids: dtype of its scales. switches:
    gated, symmetric, biased. mean: of x, whose rows lie in wider ones that are no numbers.
    """
    tokens, rows, columns = size
    generator = torch.Generator().manual_seed(rows)
    tensors = of.random_weight(
        rows, columns, min(group, columns), device="cpu", symmetric=switches.get("symmetric", False)
    )
    weight, scale, offset = tensors["weight"], tensors["scale"].to(grids), tensors["offset"]
    offset = None if offset is None else offset.to(grids)
    x = torch.full((tokens, columns + 24), float("nan")).to(dtype)[:, :columns]
    x[:] = torch.randn(tokens, columns, generator=generator) + mean
    x[:, ::37] *= 30
    biased = switches.get("biased", False)
    bias = torch.randn(rows, generator=generator).to(dtype) if biased else None
    dense = of.dequantize_weight(weight, scale, offset, min(group, columns), columns, torch.float64)
    return GroupwiseLinearInputs(x, weight, scale, offset, group, bias), dense
