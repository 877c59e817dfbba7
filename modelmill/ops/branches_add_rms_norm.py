"""A scaled branch, or the sum of two, added to the residual stream, and RMSNorm of the sum.

Granite scales its branches; Falcon-H1 adds two that lie side by side (arXiv:2507.22448).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.rms_norm import rms_norm

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-2, torch.bfloat16: 8e-2}


class BranchesAddRMSNormInputs(NamedTuple):
    """The operands.

    Attributes:
        x: [T, H].
        other: [T, H], a second branch, or None.
        factor: of the branch or of the sum of both.
        residual: [T, H]; implementations may write the sum into its memory.
        weight: [H].
        eps: added to the mean square.
    """

    x: torch.Tensor
    other: torch.Tensor | None
    factor: float
    residual: torch.Tensor
    weight: torch.Tensor
    eps: float


DECLARATION = OpDeclaration(fuses=("add_rms_norm",), optional=True, inputs=BranchesAddRMSNormInputs)


def branches_add_rms_norm(inputs: BranchesAddRMSNormInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(total), total) with total = (x + other) · factor + residual.

    Each step is rounded to x's dtype.
    """
    x, other, factor, residual, weight, eps = inputs
    branch = x if other is None else x + other
    total = (branch if factor == 1.0 else branch * factor) + residual
    return rms_norm(total, weight, eps), total


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """A scaled branch, two branches, and both; odd widths."""
    shapes = [(1, 64, False, 0.22), (3, 100, True, 1.0), (5, 96, True, 1.5)]
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(
    shapes: Iterable[tuple[int, int, bool, float]], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Cases of (rows, width, whether there are two branches, their factor)."""
    for rows, width, two, factor in shapes:
        x, other, residual = (
            randn(rows, width, device=device, dtype=dtype, seed=seed, scale=scale)
            for seed, scale in ((rows, 1.0), (width, 1.0), (rows + width, 10.0))
        )
        weight = randn(width, device=device, dtype=dtype, seed=width) + 1
        inputs = BranchesAddRMSNormInputs(x, other if two else None, factor, residual, weight, 1e-5)
        moved = (5 if two else 4) * nbytes(x) + nbytes(weight)
        name = f"{rows}x{width}{'-two' if two else ''}-{factor}"
        yield Case(name, inputs._asdict(), moved, writes=("residual",))
