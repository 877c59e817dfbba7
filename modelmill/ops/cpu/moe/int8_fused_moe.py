"""The experts of a mixture with int8 weights in C++ (int8_fused_moe.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.moe import experts
from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.moe_support import MoESupportRange

unavailable_reason = build.unavailable_reason
SUPPORTED_PROBLEMS = (MoESupportRange(weight_dtype=torch.int8),)


def supports(inputs: FusedMoEInputs) -> bool:
    """int8 weights with float32 scales, one a row."""
    return (
        experts.supports_moe_operands(inputs, torch.int8)
        and experts.supports_scales_and_offsets(inputs, torch.float32)
        and inputs.group == 0
        and inputs.gate_up_offset is None
        and inputs.down_offset is None
    )


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """Run the op."""
    return experts.run_experts("int8_fused_moe", inputs)
