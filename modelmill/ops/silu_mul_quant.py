"""SwiGLU with an 8-bit output (per-token or static scale), the input of down_proj."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops import rms_norm_quant
from modelmill.ops.case import Case, RowShapes, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.gelu_quant import named_quant_mode_args
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.row_op_support import make_quantized_row_op_problem
from modelmill.ops.silu_mul import silu_mul

# In steps of the 8-bit type: the gate is rounded to x's dtype once or twice.
TOLERANCE = rms_norm_quant.TOLERANCE

DECLARATION = OpDeclaration(
    problem=make_quantized_row_op_problem,
    operands=("gate_up", "dtype", "inv_scale"),
    guard=make_row_op_guard,
)


def silu_mul_quant(
    gate_up: torch.Tensor, dtype: torch.dtype, inv_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize silu_mul(gate_up), rounded to its dtype first; dtypes and scales as ``gelu_quant``.

    gate_up: [T, 2·I] floating point. Returns (values [T, I], scale [T] or None).
    """
    return rms_norm_quant.quantize_rows(silu_mul(gate_up), ActQuantSpec(dtype, inv_scale))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill rows of small, 7B and odd widths; both dtypes, static and per token."""
    shapes = [(1, 1536), (5, 101), (3, 8)] + (
        [] if device == "cpu" else [(1, 11008), (64, 11008), (1000, 11008)]
    )
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(shapes: RowShapes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of (rows, outputs) in all quantization modes."""
    for rows, inner in shapes:
        x = randn(rows, 2 * inner, device=device, dtype=dtype, seed=rows + inner, scale=2.0)
        for name, mode in named_quant_mode_args(device, 9.5):
            args = {"gate_up": x, **mode}
            yield Case(f"{rows}x{inner}-{name}", args, nbytes(x) + rows * inner)
