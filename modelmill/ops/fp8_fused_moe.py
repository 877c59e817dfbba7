"""The experts of a mixture with weights and activations in fp8 (e4m3), else as w8a8_fused_moe."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.fused_moe import FusedMoEInputs, moe_cost
from modelmill.ops.int8_fused_moe import make_8bit_moe_cases
from modelmill.ops.op_cost import FP8_DTYPE_NAME
from modelmill.ops.w8a8_fused_moe import TOLERANCE as TOLERANCE
from modelmill.ops.w8a8_fused_moe import quantized_experts_reference

DECLARATION = OpDeclaration(inputs=FusedMoEInputs, cost=partial(moe_cost, act_dtype=FP8_DTYPE_NAME))


def fp8_fused_moe(inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute ``fused_moe`` with quantized activations, weights e4m3 and scales [E, N] float32.

    Returns:
        [T, H] of x's dtype.
    """
    return quantized_experts_reference(inputs, torch.float8_e4m3fn)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The shapes of fused_moe."""
    yield from make_8bit_moe_cases(device, dtype, torch.float8_e4m3fn)
