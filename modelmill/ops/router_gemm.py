"""The router of a mixture of experts: the logits of all experts, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration

DECLARATION = OpDeclaration()

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}


def router_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x · weightᵀ in float32 (float64 if x is).

    Args:
        x: [T, H], floating point.
        weight: [E, H], floating point.

    Returns:
        [T, E]; nothing is rounded to x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) @ weight.to(wide).T


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """One token and several, odd sizes; Qwen3-30B-A3B's router on a GPU."""
    shapes = [(1, 96, 8), (5, 67, 9), (20, 160, 33)]
    if device != "cpu":
        shapes += [(rows, 2048, 128) for rows in (1, 16, 256, 4096)]
    for rows, hidden, experts in shapes:
        args = {
            "x": randn(rows, hidden, device=device, dtype=dtype, seed=rows),
            "weight": randn(
                experts, hidden, device=device, dtype=dtype, seed=experts, scale=hidden**-0.5
            ),
        }
        moved = nbytes(*args.values()) + 4 * rows * experts
        yield Case(f"{rows}x{hidden}->{experts}", args, moved, 2 * rows * hidden * experts)
