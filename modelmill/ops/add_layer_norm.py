"""Residual add and LayerNorm in one pass: the residual stream is read and written once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, RowShapes, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.layer_norm import layer_norm
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.row_op_support import RowOpProblem, make_row_op_problem


def _make_problem(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *_: float
) -> RowOpProblem:
    return make_row_op_problem(x, weight, bias, residual=residual)


DECLARATION = OpDeclaration(
    problem=_make_problem,
    operands=("x", "residual", "weight", "bias", "eps"),
    per_call="residual",
    guard=make_row_op_guard,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}
CASE_SHAPES = ((1, 768), (7, 1024), (3, 100), (35, 40))


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute layer_norm(x + residual) and the sum; the sum is rounded to x's dtype first.

    Args:
        x: [..., H].
        residual: [..., H], x's dtype.
        weight: [H].
        bias: [H].
        eps: added to the variance.

    Returns:
        (layer_norm(x + residual), x + residual).
    """
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Usual and odd widths, few and many rows; the residual has ten times the scale of x."""
    yield from cases_for_shapes(
        (*CASE_SHAPES, *(() if device == "cpu" else ((4096, 1280),))), device, dtype
    )


def cases_for_shapes(shapes: RowShapes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of (rows, width)."""
    for rows, width in shapes:
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width)
        residual = randn(rows, width, device=device, dtype=dtype, seed=rows + width, scale=10.0)
        weight = randn(width, device=device, dtype=dtype, seed=width) + 1
        bias = randn(width, device=device, dtype=dtype, seed=width + 1)
        args = {"x": x, "residual": residual, "weight": weight, "bias": bias, "eps": 1e-6}
        yield Case(f"{rows}x{width}", args, 4 * nbytes(x) + nbytes(weight, bias))
