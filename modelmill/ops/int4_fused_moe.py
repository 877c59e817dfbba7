"""The experts of a mixture with 4-bit weights in groups of columns (W4A16)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from modelmill.ops import fused_moe
from modelmill.ops.case import Case
from modelmill.ops.fused_moe import (
    SMALL_SHAPES,
    FusedMoEInputs,
    moe_reference_with_dequantize,
)
from modelmill.ops.int4_linear import dequantize_weight, random_weight
from modelmill.ops.moe_support import declare_moe_with_ranges

DECLARATION = declare_moe_with_ranges()

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


def int4_fused_moe(inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute ``fused_moe`` with the weights of ``int4_linear``, one after another in [E, N, row].

    Returns:
        [T, H] of x's dtype.
    """
    return moe_reference_with_dequantize(inputs, dequantize_weight)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The shapes of fused_moe; groups of 32 and 128 columns, the first symmetric."""
    for shape in fused_moe.case_shapes(device):
        group = 32 if shape in SMALL_SHAPES[:2] else 128
        draw = partial(
            random_weight, group=group, device=device, symmetric=shape == SMALL_SHAPES[0]
        )
        weights = fused_moe.make_expert_weight_args(shape, draw)
        yield fused_moe.make_moe_case(shape, device, dtype, weights, group)
