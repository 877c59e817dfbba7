"""Residual add and RMSNorm in one pass: the residual stream is read and written once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.rms_norm import CASE_SHAPES, rms_norm
from modelmill.ops.row_op_support import RowOpProblem, make_row_op_problem


def _make_problem(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *_: float
) -> RowOpProblem:
    return make_row_op_problem(x, weight, residual=residual)


DECLARATION = OpDeclaration(
    problem=_make_problem,
    operands=("x", "residual", "weight", "eps"),
    per_call="residual",
    guard=make_row_op_guard,
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute rms_norm(x + residual) and the sum; the sum is rounded to x's dtype first.

    Implementations may write the sum into the residual's memory.

    Args:
        x: [..., H].
        residual: [..., H], x's dtype.
        weight: [H].
        eps: added to the mean square.

    Returns:
        (rms_norm(x + residual), x + residual).
    """
    total = x + residual
    return rms_norm(total, weight, eps), total


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The shapes of rms_norm; the residual has ten times the scale of x."""
    for rows, width in CASE_SHAPES:
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width)
        residual = randn(rows, width, device=device, dtype=dtype, seed=rows + width, scale=10.0)
        weight = randn(width, device=device, dtype=dtype, seed=width) + 1
        moved = 4 * nbytes(x) + nbytes(weight)
        yield Case(
            f"{rows}x{width}",
            {"x": x, "residual": residual, "weight": weight, "eps": 1e-5},
            moved,
            writes=("residual",),
        )
