"""The experts of a mixture with MXFP4 weights in C++ (mxfp4_fused_moe.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.moe import experts
from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.moe_support import MoESupportRange
from modelmill.ops.mxfp4_fused_moe import BLOCK_COLUMNS

unavailable_reason = build.unavailable_reason
SUPPORTED_PROBLEMS = (MoESupportRange(weight_dtype=torch.uint8),)


def supports(inputs: FusedMoEInputs) -> bool:
    """Packed 4-bit codes with a scale for each block of columns, without offsets."""
    return (
        inputs.group == BLOCK_COLUMNS
        and inputs.gate_up_offset is None
        and inputs.down_offset is None
        and experts.supports_moe_operands(inputs, torch.uint8)
        and experts.supports_scales_and_offsets(inputs, torch.uint8)
    )


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """Run the op."""
    return experts.run_experts("mxfp4_fused_moe", inputs)
