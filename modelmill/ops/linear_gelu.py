"""Matrix product and GELU in one op; no intermediate in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.gelu import gelu
from modelmill.ops.kernel_support import make_dense_gemm_problem
from modelmill.ops.linear import linear
from modelmill.ops.linear_cases import dense_args, linear_case
from modelmill.ops.op_cost import gemm_cost

DECLARATION = OpDeclaration(
    problem=make_dense_gemm_problem, operands=("x", "weight", "bias"), cost=gemm_cost
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def linear_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute gelu(x Wᵀ + bias).

    In 16 bits an implementation may use the tanh approximation, whose error is below 5e-4.

    Args:
        x: [T, K].
        weight: [N, K].
        bias: [N] or None.

    Returns:
        [T, N].
    """
    return gelu(linear(x, weight, bias))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """One, few and many rows; the shape of SAM's ViT-H only on a GPU."""
    shapes = [(1, 576, 1536), (5, 100, 33), (70, 64, 48)]
    if device != "cpu":
        shapes += [(4096, 1280, 5120)]
    for rows, k, n in shapes:
        args = dense_args(
            rows, k, n, device=device, dtype=dtype, x_seed=rows + k, has_bias=rows != 5
        )
        yield linear_case(args)
