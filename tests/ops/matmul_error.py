"""How far a matrix product is from the same in float64."""

from __future__ import annotations

import torch

ROUNDING_LIMIT = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
"""Of the error where the output's own rounding makes it, by the output's dtype."""


def matmul_error(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
) -> float:
    """The error of the whole, in the norm; gated: ``out`` is SwiGLU of the product."""
    expected = x.double() @ weight.double().T
    expected = expected if bias is None else expected + bias.double()
    if gated:
        gate, up = expected.to(x.dtype).double().chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    return float((out.double() - expected).norm() / expected.norm())
