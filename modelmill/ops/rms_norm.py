"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), as LLaMA computes it in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.row_op_support import RowOpProblem, make_row_op_problem


def _make_problem(x: torch.Tensor, weight: torch.Tensor, *_: float) -> RowOpProblem:
    return make_row_op_problem(x, weight)


DECLARATION = OpDeclaration(
    problem=_make_problem, operands=("x", "weight", "eps"), guard=make_row_op_guard
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-2, torch.bfloat16: 8e-2}
CASE_SHAPES = ((1, 64), (3, 576), (7, 100), (1024, 4096), (5, 8193), (1, 4096))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize rows in float32, cast to x's dtype, then multiply by the weight.

    x: [..., H] float32, float16 or bfloat16. weight: [H], x's dtype. Returns the shape and dtype of
    x.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype) * weight


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Odd and usual shapes, including the prefill and decode row counts of the benchmarks."""
    for rows, width in CASE_SHAPES:
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width)
        weight = randn(width, device=device, dtype=dtype, seed=width) + 1
        yield Case(
            f"{rows}x{width}",
            {"x": x, "weight": weight, "eps": 1e-5},
            2 * nbytes(x) + nbytes(weight),
        )
