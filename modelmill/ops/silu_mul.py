"""SwiGLU activation (Shazeer 2020, arXiv:2002.05202): silu(gate) · up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, RowShapes, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.row_op_support import make_row_op_problem

DECLARATION = OpDeclaration(
    problem=make_row_op_problem, operands=("gate_up",), guard=make_row_op_guard
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) · up.

    gate_up: [T, 2·I], gate in the first I columns, up in the last. Returns [T, I].
    """
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill rows of small and 7B widths, and an odd one."""
    yield from cases_for_shapes(((1, 1536), (5, 101), (64, 11008), (1, 11008)), device, dtype)


def cases_for_shapes(shapes: RowShapes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of (rows, outputs)."""
    for rows, inner in shapes:
        x = randn(rows, 2 * inner, device=device, dtype=dtype, seed=rows + inner, scale=2.0)
        yield Case(f"{rows}x{inner}", {"gate_up": x}, nbytes(x) * 3 // 2)
