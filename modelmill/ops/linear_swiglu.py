"""Gate and up projections and SwiGLU in one op; no intermediate in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.kernel_support import make_dense_gemm_problem
from modelmill.ops.linear import linear
from modelmill.ops.linear_cases import dense_args, linear_case
from modelmill.ops.op_cost import gemm_cost
from modelmill.ops.silu_mul import silu_mul

DECLARATION = OpDeclaration(
    fuses=("linear", "silu_mul"),
    problem=make_dense_gemm_problem,
    operands=("x", "weight", "bias"),
    cost=partial(gemm_cost, matrices=2),
)

TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


def linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute silu(x Gᵀ) · (x Uᵀ).

    The products are rounded to x's dtype before the gate, as two separate ops would do.

    Args:
        x: [T, K].
        weight: [2·I, K], G above U.
        bias: [2·I] or None.

    Returns:
        [T, I].
    """
    return silu_mul(linear(x, weight, bias))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode rows, odd sizes; the 7B shape only on a GPU."""
    shapes = [(1, 576, 1536), (5, 100, 33), (1, 65, 7), (16, 128, 64)]
    if device != "cpu":
        shapes += [(rows, 4096, 11008) for rows in (1, 8, 32, 64, 4096)]
        shapes += [(768, 520, 2816)]
    for rows, k, inner in shapes:
        args = dense_args(
            rows,
            k,
            inner,
            device=device,
            dtype=dtype,
            x_seed=rows + k,
            has_bias=inner % 2 == 1,
            gated=True,
        )
        yield linear_case(args, gated=True)
