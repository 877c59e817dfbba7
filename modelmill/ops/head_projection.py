"""The rates of a recurrence's heads: a small matrix that is never quantized, in float32.

Apart from ``router_gemm``: on a CPU that op's kernel for few tokens sums in another order than
torch does for many, and the states of a prompt are not to depend on how steps divide it. On a GPU
they do, by float32's rounding: kernels sum differently for other numbers of rows there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.op_cost import gemm_cost

DECLARATION = OpDeclaration(cost=gemm_cost)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}


def head_projection(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x · weightᵀ in float32; nothing is rounded to x's dtype.

    Args:
        x: [T, H].
        weight: [N, H].

    Returns:
        [T, N] float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) @ weight.to(wide).T


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """One token and several, an odd width."""
    yield from cases_for_shapes([(1, 96, 8), (5, 67, 9), (20, 64, 6)], device, dtype)


def cases_for_shapes(
    shapes: Iterable[tuple[int, int, int]], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Cases of (rows, hidden size, outputs)."""
    for rows, hidden, outputs in shapes:
        args = {
            "x": randn(rows, hidden, device=device, dtype=dtype, seed=rows),
            "weight": randn(
                outputs, hidden, device=device, dtype=dtype, seed=outputs, scale=hidden**-0.5
            ),
        }
        moved = nbytes(*args.values()) + 4 * rows * outputs
        yield Case(f"{rows}x{hidden}->{outputs}", args, moved, 2 * rows * hidden * outputs)
