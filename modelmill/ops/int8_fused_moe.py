"""The experts of a mixture with int8 weights, one scale per output channel (W8A16)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.fused_moe import (
    A3B_SHAPES,
    SMALL_SHAPES,
    FusedMoEInputs,
    experts_case,
    experts_reference,
)
from modelmill.ops.quant_types import quantize_per_row

DECLARATION = OpDeclaration(inputs=FusedMoEInputs)

TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}


def int8_fused_moe(inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute ``fused_moe`` with weights int8 and scales [E, N] float32.

    Returns:
        [T, H] of x's dtype.
    """
    return experts_reference(inputs, dequantize_rows)


def dequantize_rows(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,  # noqa: ARG001
    group: int,  # noqa: ARG001
    columns: int,  # noqa: ARG001
    dtype: torch.dtype,
) -> torch.Tensor:
    """The matrix of one expert, with a scale for each row."""
    assert scale is not None, "weights in 8 bits have scales"
    return weight.to(dtype) * scale.to(dtype)[:, None]


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The shapes of fused_moe."""
    yield from cases_in_8_bits(device, dtype, torch.int8)


def cases_in_8_bits(device: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> Iterator[Case]:
    """The shapes of fused_moe with weights in 8 bits, a scale for each row."""
    for shape in SMALL_SHAPES if device == "cpu" else [*SMALL_SHAPES, *A3B_SHAPES]:
        _, hidden, inner, experts, _ = shape
        weights = {}
        for name, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            wide = randn(experts * n, k, device=device, dtype=torch.float32, seed=n, scale=k**-0.5)
            codes, scale = quantize_per_row(wide, weight_dtype)
            weights[name] = codes.view(experts, n, k)
            weights[f"{name}_scale"] = scale.view(experts, n)
        yield experts_case(shape, device, dtype, weights)
