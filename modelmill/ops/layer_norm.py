"""LayerNorm (Ba et al. 2016, arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, RowShapes, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.row_op_support import RowOpProblem, make_row_op_problem


def _make_problem(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *_: float
) -> RowOpProblem:
    return make_row_op_problem(x, weight, bias)


DECLARATION = OpDeclaration(
    problem=_make_problem, operands=("x", "weight", "bias", "eps"), guard=make_row_op_guard
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalize rows; statistics in float32.

    x: [..., H]; weight, bias: [H]. Returns the shape and dtype of x.
    """
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """GPT-2 widths and an odd one."""
    yield from cases_for_shapes(((1, 768), (7, 1024), (3, 100), (512, 1600)), device, dtype)


def cases_for_shapes(shapes: RowShapes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of (rows, width)."""
    for rows, width in shapes:
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width) + 0.5
        weight = randn(width, device=device, dtype=dtype, seed=width) + 1
        bias = randn(width, device=device, dtype=dtype, seed=width + 1)
        yield Case(
            f"{rows}x{width}", {"x": x, "weight": weight, "bias": bias, "eps": 1e-5}, 2 * nbytes(x)
        )
