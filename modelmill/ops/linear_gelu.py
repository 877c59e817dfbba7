"""Matrix product and GELU in one op; no intermediate in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.gelu import gelu
from modelmill.ops.kernel_range import dense_problem
from modelmill.ops.linear import linear

DECLARATION = OpDeclaration(problem=dense_problem, operands=("x", "weight", "bias"))

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
        x = randn(rows, k, device=device, dtype=dtype, seed=rows + k)
        weight = randn(n, k, device=device, dtype=dtype, seed=k + n, scale=k**-0.5)
        bias = randn(n, device=device, dtype=dtype, seed=n) if rows != 5 else None
        moved = nbytes(x, weight, bias) + rows * n * x.element_size()
        yield Case(
            f"{rows}x{k}->{n}", {"x": x, "weight": weight, "bias": bias}, moved, 2 * rows * k * n
        )
