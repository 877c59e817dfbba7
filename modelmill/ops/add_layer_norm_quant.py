"""Residual add and LayerNorm with an 8-bit output, in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from modelmill.ops import add_layer_norm as plain
from modelmill.ops import rms_norm_quant
from modelmill.ops.case import Case, RowShapes, nbytes
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.gelu_quant import named_quant_mode_args
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.row_op_support import RowOpProblem, make_row_op_problem

TOLERANCE = rms_norm_quant.TOLERANCE


class AddLayerNormQuantInputs(NamedTuple):
    """Operands of the op.

    Attributes:
        x, residual, weight, bias, eps: as in ``add_layer_norm``.
        dtype: torch.int8 or torch.float8_e4m3fn.
        inv_scale: [1] float32 (static), or None for one scale per token.
    """

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float
    dtype: torch.dtype
    inv_scale: torch.Tensor | None = None


def _make_problem(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    _: float,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None,
) -> RowOpProblem:
    spec = ActQuantSpec(dtype, inv_scale)
    return make_row_op_problem(x, weight, bias, residual=residual, spec=spec)


DECLARATION = OpDeclaration(
    inputs=AddLayerNormQuantInputs,
    problem=_make_problem,
    per_call="residual",
    guard=make_row_op_guard,
)


def add_layer_norm_quant(
    inputs: AddLayerNormQuantInputs,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Quantize the output of ``add_layer_norm``; rounding as in ``rms_norm_quant``.

    Returns:
        (values [..., H] of ``dtype``, scale [...] float32 or None, x + residual).
    """
    x, residual, weight, bias, eps, dtype, inv_scale = inputs
    y, total = plain.add_layer_norm(x, residual, weight, bias, eps)
    return *rms_norm_quant.quantize_rows(y, ActQuantSpec(dtype, inv_scale)), total


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The cases of add_layer_norm, each with scales per token and static."""
    yield from _with_quant_modes(plain.cases(device, dtype), device)


def cases_for_shapes(shapes: RowShapes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of (rows, width) in all quantization modes."""
    yield from _with_quant_modes(plain.cases_for_shapes(shapes, device, dtype), device)


def _with_quant_modes(base_cases: Iterator[Case], device: str) -> Iterator[Case]:
    for case in base_cases:
        x = case.args["x"]
        for name, mode in named_quant_mode_args(device):
            yield Case(f"{case.name}-{name}", case.args | mode, 3 * nbytes(x) + x.numel())
