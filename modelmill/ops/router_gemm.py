"""The router of a mixture of experts: the logits of all experts, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.op_cost import gemm_cost

DECLARATION = OpDeclaration(cost=gemm_cost)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}


def router_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Compute x · weightᵀ · scale + bias in float32 (float64 if x is).

    Args:
        x: [T, H], floating point.
        weight: [E, H], floating point.
        bias: [E], floating point, or None.
        scale: factor of the products.

    Returns:
        [T, E]; nothing is rounded to x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return scale_logits_and_add_bias(x.to(wide) @ weight.to(wide).T, bias, scale)


def scale_logits_and_add_bias(
    products: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The logits of products x · weightᵀ."""
    logits = products if scale == 1.0 else products * scale
    return logits if bias is None else logits + bias.to(logits.dtype)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """One token and several, odd sizes, biases; Qwen3-30B-A3B's and gpt-oss's router on a GPU."""
    shapes = [(1, 96, 8, False), (5, 67, 9, True), (20, 160, 33, True)]
    if device != "cpu":
        shapes += [(rows, 2048, 128, False) for rows in (1, 16, 256, 4096)]
        shapes += [(rows, 2880, 32, True) for rows in (1, 64)]
    for rows, hidden, experts, biased in shapes:
        args: dict[str, Any] = {
            "x": randn(rows, hidden, device=device, dtype=dtype, seed=rows),
            "weight": randn(
                experts, hidden, device=device, dtype=dtype, seed=experts, scale=hidden**-0.5
            ),
        }
        moved = nbytes(*args.values()) + 4 * rows * experts
        if biased:
            bias = randn(experts, device=device, dtype=dtype, seed=rows)
            args |= {"bias": bias, "scale": 0.25}
        yield Case(
            f"{rows}x{hidden}->{experts}{' bias' if biased else ''}",
            args,
            moved,
            2 * rows * hidden * experts,
        )
