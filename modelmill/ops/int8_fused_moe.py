"""The experts of a mixture with int8 weights, one scale per output channel (W8A16)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops import fused_moe
from modelmill.ops.case import Case, randn
from modelmill.ops.fused_moe import TOLERANCE as TOLERANCE
from modelmill.ops.fused_moe import FusedMoEInputs, moe_reference_with_dequantize
from modelmill.ops.moe_support import declare_moe_with_ranges
from modelmill.ops.quant_types import quantize_per_row

DECLARATION = declare_moe_with_ranges()


def int8_fused_moe(inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute ``fused_moe`` with weights int8 and scales [E, N] float32.

    Returns:
        [T, H] of x's dtype.
    """
    return moe_reference_with_dequantize(inputs, dequantize_expert_rows)


def dequantize_expert_rows(
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
    yield from make_8bit_moe_cases(device, dtype, torch.int8)


def make_8bit_moe_cases(
    device: str, dtype: torch.dtype, weight_dtype: torch.dtype
) -> Iterator[Case]:
    """The shapes of fused_moe with weights in 8 bits, a scale for each row."""
    for shape in fused_moe.case_shapes(device):
        weights = {}
        for name, experts, n, k in fused_moe.expert_weight_shapes(shape):
            wide = randn(experts * n, k, device=device, dtype=torch.float32, seed=n, scale=k**-0.5)
            codes, scale = quantize_per_row(wide, weight_dtype)
            weights[name] = codes.view(experts, n, k)
            weights[f"{name}_scale"] = scale.view(experts, n)
        yield fused_moe.make_moe_case(shape, device, dtype, weights)
