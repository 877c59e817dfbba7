"""The experts of a mixture with weights and activations in int8.

Every token's x, and every pair's product with the gate, has its own scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.fused_moe import FusedMoEInputs, moe_cost, moe_reference_with_dequantize
from modelmill.ops.int8_fused_moe import dequantize_expert_rows, make_8bit_moe_cases
from modelmill.ops.op_cost import INT8_DTYPE_NAME
from modelmill.ops.quant_types import quantize_per_row

DECLARATION = OpDeclaration(
    inputs=FusedMoEInputs, cost=partial(moe_cost, act_dtype=INT8_DTYPE_NAME)
)

# a value at the border of two codes may take either one
TOLERANCE = {torch.float32: 6e-2, torch.float16: 6e-2, torch.bfloat16: 2e-1}


def w8a8_fused_moe(inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute ``fused_moe`` with quantized activations, weights int8 and scales [E, N] float32.

    Returns:
        [T, H] of x's dtype.
    """
    return quantized_experts_reference(inputs, torch.int8)


def quantized_experts_reference(inputs: FusedMoEInputs, dtype: torch.dtype) -> torch.Tensor:
    """Compute it with weights of an 8-bit dtype, to which every row of x is rounded, too."""

    def round_rows(x: torch.Tensor) -> torch.Tensor:
        values, scale = quantize_per_row(x, dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        return values.to(wide) * scale[:, None].to(wide)

    return moe_reference_with_dequantize(inputs, dequantize_expert_rows, round_rows)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The shapes of fused_moe."""
    yield from make_8bit_moe_cases(device, dtype, torch.int8)
