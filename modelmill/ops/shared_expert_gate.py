"""The gate of a shared expert: its output times sigmoid(x · w) of each token (Qwen2-MoE).

Qwen2 report, arXiv:2407.10671; the gate is in its published code only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration

DECLARATION = OpDeclaration()

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def shared_expert_gate(
    x: torch.Tensor, weight: torch.Tensor, expert_out: torch.Tensor
) -> torch.Tensor:
    """Compute expert_out · sigmoid(x · w); the sigmoid is rounded to expert_out's dtype.

    Args:
        x: [T, H], the input of the experts.
        weight: [1, H].
        expert_out: [T, H], the shared expert's output.

    Returns:
        [T, H] in expert_out's dtype.
    """
    return expert_out * (x.float() @ weight.float().T).sigmoid().to(expert_out.dtype)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """One token and several, odd widths."""
    yield from cases_for_shapes(((1, 64), (5, 67), (20, 160)), device, dtype)


def cases_for_shapes(
    shapes: Sequence[tuple[int, int]], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Cases of (tokens, hidden)."""
    for tokens, hidden in shapes:
        args = {
            "x": randn(tokens, hidden, device=device, dtype=dtype, seed=tokens),
            "weight": randn(1, hidden, device=device, dtype=dtype, seed=hidden, scale=hidden**-0.5),
            "expert_out": randn(tokens, hidden, device=device, dtype=dtype, seed=tokens + 1),
        }
        moved = nbytes(*args.values()) + nbytes(args["expert_out"])
        yield Case(f"{tokens}x{hidden}", args, moved)
