"""Gate and up projections with int8 weights and SwiGLU in one op; no intermediate in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.int8_linear import cases_for_shapes, int8_linear
from modelmill.ops.kernel_support import make_gemm_problem
from modelmill.ops.op_cost import gemm_cost
from modelmill.ops.silu_mul import silu_mul

DECLARATION = OpDeclaration(
    fuses=("int8_linear", "silu_mul"),
    optional=True,
    problem=make_gemm_problem,
    operands=("x", "weight", "scale", "bias"),
    cost=partial(gemm_cost, matrices=2),
)

TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


def int8_linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute silu(x Gᵀ) · (x Uᵀ).

    The products are rounded to x's dtype before the gate, as two separate ops would do. Arguments
    as in int8_linear; the weight has 2·I rows, G above U, and so have scale and bias.

    Returns:
        [T, I] of x's dtype.
    """
    return silu_mul(int8_linear(x, weight, scale, bias))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode rows, odd sizes; the 7B shape only on a GPU."""
    shapes = [(1, 576, 1536), (5, 100, 33), (1, 65, 7), (16, 128, 64)]
    if device != "cpu":
        shapes += [(rows, 4096, 11008) for rows in (1, 8, 64, 512)]
    yield from cases_for_shapes(shapes, device, dtype, gated=True)
