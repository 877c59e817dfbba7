"""Matrix product added to the residual stream in one op; no intermediate in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from modelmill.ops.case import Case, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.kernel_support import GemmProblem, make_dense_gemm_problem
from modelmill.ops.linear import linear
from modelmill.ops.linear_cases import dense_args, linear_case
from modelmill.ops.op_cost import gemm_cost


def _make_problem(
    x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None = None
) -> GemmProblem:
    """The product without the residual."""
    return make_dense_gemm_problem(x, weight, bias)


_ACTIVATIONS = ("x", "residual")

DECLARATION = OpDeclaration(
    fuses=("linear", "add_rms_norm"),
    optional=True,
    problem=_make_problem,
    operands=("x", "weight", "residual", "bias"),
    per_call="residual",
    cost=partial(gemm_cost, activations=_ACTIVATIONS),
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute residual + x Wᵀ (+ bias).

    The reference rounds the product before the addition, as two separate ops would do.
    Implementations may round once.

    Args:
        x: [T, K].
        weight: [N, K].
        residual: [T, N], overwritten with the sum.
        bias: [N] or None.

    Returns:
        ``residual``.
    """
    return residual.add_(linear(x, weight, bias))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Prompts, odd sizes; the 7B shapes only on a GPU."""
    shapes = [(5, 72, 40), (300, 136, 200), (512, 64, 96)]
    if device != "cpu":
        shapes += [(rows, k, 4096) for rows in (1024, 4096) for k in (4096, 11008)]
        shapes += [(1000, 520, 328)]
    for rows, k, n in shapes:
        args = dense_args(
            rows, k, n, device=device, dtype=dtype, x_seed=rows + k, has_bias=n % 16 != 0
        )
        args["residual"] = randn(rows, n, device=device, dtype=dtype, seed=rows + n, scale=3.0)
        yield linear_case(args, writes=("residual",))
