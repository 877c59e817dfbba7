"""The experts of a mixture with MXFP4 weights, as gpt-oss stores them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from modelmill.ops import fused_moe
from modelmill.ops.case import Case
from modelmill.ops.fused_moe import FusedMoEInputs, moe_reference_with_dequantize
from modelmill.ops.int4_fused_moe import TOLERANCE as TOLERANCE
from modelmill.ops.moe_support import declare_moe_with_ranges
from modelmill.ops.mxfp4_linear import BLOCK_COLUMNS as BLOCK_COLUMNS
from modelmill.ops.mxfp4_linear import dequantize_weight, random_weight

DECLARATION = declare_moe_with_ranges()


def mxfp4_fused_moe(inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute ``fused_moe`` with the weights of ``mxfp4_linear``, one after another in [E, N, row].

    Returns:
        [T, H] of x's dtype.
    """
    return moe_reference_with_dequantize(inputs, dequantize_weight)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The shapes of fused_moe, and gpt-oss's sizes with fewer experts on a GPU."""
    more = [] if device == "cpu" else [(rows, 2880, 2880, 8, 4) for rows in (1, 40)]
    for shape in (*fused_moe.case_shapes(device), *more):
        draw = partial(random_weight, group=BLOCK_COLUMNS, device=device, symmetric=True)
        weights = fused_moe.make_expert_weight_args(shape, draw)
        yield fused_moe.make_moe_case(shape, device, dtype, weights, BLOCK_COLUMNS)
