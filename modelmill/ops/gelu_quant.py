"""GELU with an 8-bit output (per-token or static scale), the input of an MLP's second matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops import rms_norm_quant
from modelmill.ops.case import Case, RowShapes, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.gelu import gelu
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.row_op_support import make_quantized_row_op_problem

DECLARATION = OpDeclaration(
    problem=make_quantized_row_op_problem,
    operands=("x", "dtype", "inv_scale"),
    guard=make_row_op_guard,
)

TOLERANCE = rms_norm_quant.TOLERANCE


def gelu_quant(
    x: torch.Tensor, dtype: torch.dtype, inv_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize gelu(x), rounded to x's dtype first; as in ``rms_norm_quant``.

    Args:
        x: [..., H] float32, float16 or bfloat16.
        dtype: torch.int8 or torch.float8_e4m3fn.
        inv_scale: [1] float32 (static), or None for one scale per token.

    Returns:
        (values [..., H] of ``dtype``, scale [...] float32 or None).
    """
    return rms_norm_quant.quantize_rows(gelu(x), ActQuantSpec(dtype, inv_scale))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Scales per token and static, odd and usual widths."""
    shapes = ((1, 64), (3, 576), (7, 101)) if device == "cpu" else ((1, 64), (7, 101), (4096, 5120))
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(shapes: RowShapes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of (rows, width) in all quantization modes."""
    for rows, width in shapes:
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width, scale=2.0)
        for name, mode in named_quant_mode_args(device):
            yield Case(f"{rows}x{width}-{name}", {"x": x, **mode}, nbytes(x) + rows * width)


def named_quant_mode_args(
    device: str, factor: float = 20.0
) -> Iterator[tuple[str, dict[str, object]]]:
    """(name, arguments) of each quantization mode; factor: 1 / scale where it is static."""
    inv_scale = torch.full((1,), factor, device=device)
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        yield f"{name}-token", {"dtype": dtype}
        yield f"{name}-static", {"dtype": dtype, "inv_scale": inv_scale}
