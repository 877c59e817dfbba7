"""Shared by the references of products with group-wise quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.kernel_range import GemmProblem, gemm_problem
from modelmill.ops.linear import linear

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


def groupwise_problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> GemmProblem:
    """The product of ``GroupwiseLinearInputs``."""
    return gemm_problem(x, weight, scale, bias, group=group, offset=offset)


class RandomWeight(Protocol):
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


def expand_groups(grid: torch.Tensor, group: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Expand values per group [N, ⌈columns/group⌉] to values per column [N, columns]."""
    return grid.to(dtype).repeat_interleave(group, 1)[:, :columns]


def cases_for_shapes(
    shapes: list[tuple[int, int, int, int]],
    random_weight: RandomWeight,
    device: str,
    dtype: torch.dtype,
) -> Iterator[Case]:
    """Cases of (rows, K, N, group): symmetric where rows is 5, with a bias where N is odd."""
    for rows, k, n, group in shapes:
        x = randn(rows, k, device=device, dtype=dtype, seed=rows + k + n)
        args = {
            "x": x,
            **random_weight(n, k, group, device=device, symmetric=rows == 5),
            "group": group,
        }
        args["bias"] = randn(n, device=device, dtype=dtype, seed=n) if n % 2 else None
        moved = (
            nbytes(*(a for a in args.values() if isinstance(a, torch.Tensor)))
            + rows * n * x.element_size()
        )
        yield Case(f"{rows}x{k}->{n} g{group}", args, moved, 2 * rows * k * n)
