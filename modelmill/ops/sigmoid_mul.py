"""x · sigmoid(gate), the gate of an attention's output (arXiv:2505.06708)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, RowShapes, nbytes, randn
from modelmill.ops.causal_conv import batch_invariant_sigmoid
from modelmill.ops.declaration import OpDeclaration

DECLARATION = OpDeclaration()

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute x · sigmoid(gate) in float32, rounded once to x's dtype.

    x, gate: [T, N] of one dtype. Returns [T, N].
    """
    return (x.float() * batch_invariant_sigmoid(gate.float())).to(x.dtype)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill rows, and an odd width."""
    yield from cases_for_shapes(((1, 512), (5, 101), (70, 128)), device, dtype)


def cases_for_shapes(shapes: RowShapes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Cases of (rows, columns)."""
    for rows, width in shapes:
        x = randn(rows, width, device=device, dtype=dtype, seed=rows)
        gate = randn(rows, width, device=device, dtype=dtype, seed=width, scale=2.0)
        yield Case(f"{rows}x{width}", {"x": x, "gate": gate}, 3 * nbytes(x))
