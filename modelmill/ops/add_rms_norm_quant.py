"""Residual add and RMSNorm with an 8-bit output, in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops import rms_norm_quant
from modelmill.ops.add_rms_norm import add_rms_norm
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.row_op_support import RowOpProblem, make_row_op_problem


def _make_problem(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, _: float, spec: ActQuantSpec
) -> RowOpProblem:
    return make_row_op_problem(x, weight, residual=residual, spec=spec)


DECLARATION = OpDeclaration(
    inputs=ActQuantSpec,
    inputs_name="spec",
    problem=_make_problem,
    operands=("x", "residual", "weight", "eps", "spec"),
    per_call="residual",
    guard=make_row_op_guard,
)

TOLERANCE = rms_norm_quant.TOLERANCE


def add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, spec: ActQuantSpec
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Apply ``rms_norm_quant`` to x + residual; the sum is rounded to x's dtype first.

    x, residual: [..., H], same dtype; the sum is not permuted. Implementations may write it into
    the residual's memory. Other arguments as in ``rms_norm_quant``.

    Returns:
        (values, scale or None, x + residual).
    """
    y, total = add_rms_norm(x, residual, weight, eps)
    return *rms_norm_quant.quantize_rows(y, spec), total


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The cases of rms_norm_quant; the residual has ten times the scale of x."""
    for case in rms_norm_quant.cases(device, dtype):
        x = case.args["x"]
        residual = randn(*x.shape, device=device, dtype=dtype, seed=sum(x.shape), scale=10.0)
        moved = case.bytes_moved + 2 * nbytes(x)
        yield Case(case.name, case.args | {"residual": residual}, moved, writes=("residual",))
