"""Shared by the references of products with group-wise quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from modelmill.ops.case import Case, randn
from modelmill.ops.kernel_support import GemmProblem, make_gemm_problem
from modelmill.ops.linear import linear
from modelmill.ops.linear_cases import linear_case

PACK_COLUMNS = 32  # columns that are packed together; a group size is a multiple of it


class GroupwiseLinearInputs(NamedTuple):
    """Activations and a weight in groups of columns: operands of the group-wise products.

    Attributes:
        x: [T, K], floating point.
        weight: [N, row] codes, in the layout that the op's file describes.
        scale: [N, ⌈K/group⌉] float16 or float32.
        offset: as scale, or None (symmetric).
        group: columns that share a scale, a multiple of 32.
        bias: [N] or None.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    group: int
    bias: torch.Tensor | None = None


def make_groupwise_problem(*operands: Any) -> GemmProblem:
    """The product of ``GroupwiseLinearInputs``."""
    x, weight, scale, offset, group, bias = GroupwiseLinearInputs(*operands)
    return make_gemm_problem(x, weight, scale, bias, group=group, offset=offset)


class RandomWeightFactory(Protocol):
    """A function that makes a seeded weight [n, k]: weight, scale and offset (None: symmetric)."""

    def __call__(
        self, n: int, k: int, group: int, *, device: str, symmetric: bool
    ) -> dict[str, torch.Tensor | None]:
        """Return the weight's tensors by name."""
        ...


def matmul_reference(
    inputs: GroupwiseLinearInputs, dequantize: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Compute x · weightᵀ + bias with the weight dequantized.

    Args:
        inputs: the operands.
        dequantize: makes [N, K] of weight, scale, offset, group, K and the accumulation dtype.

    Returns:
        [T, N] of x's dtype, rounded once.
    """
    x, weight, scale, offset, group, bias = inputs
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    wide = dequantize(weight, scale, offset, group, x.shape[-1], acc_dtype)
    out = linear(x.to(acc_dtype), wide)
    return (out if bias is None else out + bias).to(x.dtype)


def dequantize_codes(
    unpack: Callable[[torch.Tensor, int], torch.Tensor],
    zero_point: int,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Dequantize to [N, columns]; a floating-point weight is already dequantized.

    Args:
        unpack: makes codes [N, columns] of the weight and ``columns``.
        zero_point: the code of 0 where there are no offsets.
        weight: see ``GroupwiseLinearInputs``, and so are scale, offset and group.
        scale: of the weight.
        offset: of the weight.
        group: of the weight.
        columns: K.
        dtype: of the result and the arithmetic.
    """
    if weight.is_floating_point():
        return weight.to(dtype)
    codes = unpack(weight, columns).to(dtype)
    step = expand_groups(scale, group, columns, dtype)
    if offset is None:
        return (codes - zero_point) * step
    return codes * step + expand_groups(offset, group, columns, dtype)


def expand_groups(grid: torch.Tensor, group: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Expand values per group [N, ⌈columns/group⌉] to values per column [N, columns]."""
    return grid.to(dtype).repeat_interleave(group, 1)[:, :columns]


def convert_weight_to_case_args(
    weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, device: str
) -> dict[str, torch.Tensor | None]:
    """A weight as arguments of a case: grids in float16, on a device."""
    tensors = {
        "weight": weight,
        "scale": scale.half(),
        "offset": None if offset is None else offset.half(),
    }
    return {name: None if t is None else t.to(device) for name, t in tensors.items()}


def cases_for_shapes(
    shapes: list[tuple[int, int, int, int]],
    random_weight: RandomWeightFactory,
    device: str,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> Iterator[Case]:
    """Cases of (rows, K, columns of the output, group).

    They are symmetric where rows is 5, with a bias where the columns are odd. gated: the weight has
    two rows for each column.
    """
    for rows, k, n, group in shapes:
        weight_rows = 2 * n if gated else n
        x_seed = rows + k + (0 if gated else n)
        args = {
            "x": randn(rows, k, device=device, dtype=dtype, seed=x_seed),
            **random_weight(weight_rows, k, group, device=device, symmetric=rows == 5),
            "group": group,
            "bias": randn(weight_rows, device=device, dtype=dtype, seed=n) if n % 2 else None,
        }
        yield linear_case(args, gated=gated, suffix=f" g{group}")
