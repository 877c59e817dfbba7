"""Activations quantized to 8 bits where no norm does it: per-token or static scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops import rms_norm_quant
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.row_op_support import RowOpProblem, make_row_op_problem


def _make_problem(x: torch.Tensor, spec: ActQuantSpec) -> RowOpProblem:
    return make_row_op_problem(x, spec=spec)


DECLARATION = OpDeclaration(
    inputs=ActQuantSpec,
    inputs_name="spec",
    problem=_make_problem,
    operands=("x", "spec"),
    guard=make_row_op_guard,
)

TOLERANCE = rms_norm_quant.TOLERANCE


def quantize(x: torch.Tensor, spec: ActQuantSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize x [..., H] float32, float16 or bfloat16; as ``rms_norm_quant`` does.

    Returns:
        (values [..., N] of ``spec.dtype``, scale [...] float32 or None).
    """
    return rms_norm_quant.quantize_rows(x, spec)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The cases of rms_norm_quant without the norm."""
    shapes = (
        rms_norm_quant.CASE_SHAPES if device != "cpu" else ((1, 64), (3, 576), (7, 100), (5, 8193))
    )
    for number, (rows, width) in enumerate(shapes):
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width)
        for name, args in rms_norm_quant.named_quant_mode_args(width, device, number):
            moved = nbytes(x) + rows * (args["perm"].numel() if "perm" in args else width)
            yield Case(f"{rows}x{width}-{name}", {"x": x, **args}, moved)
