"""Exact GELU (erf), as used by vision transformers (Hendrycks & Gimpel, arXiv:1606.08415)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, RowShapes, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.row_op_support import make_row_op_problem

DECLARATION = OpDeclaration(problem=make_row_op_problem, operands=("x",), guard=make_row_op_guard)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute x · Φ(x), Φ the normal distribution function; any shape."""
    return F.gelu(x)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """SAM's MLP width and an odd one."""
    shapes = (
        ((1, 5120), (7, 101), (64, 3072))
        if device == "cpu"
        else ((1, 5120), (7, 101), (4096, 5120))
    )
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(shapes: RowShapes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of (rows, width)."""
    for rows, width in shapes:
        x = randn(rows, width, device=device, dtype=dtype, seed=rows + width, scale=2.0)
        yield Case(f"{rows}x{width}", {"x": x}, 2 * nbytes(x))
