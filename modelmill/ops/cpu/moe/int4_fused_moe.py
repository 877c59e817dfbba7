"""The experts of a mixture with 4-bit weights in C++ (int4_fused_moe.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.moe import experts
from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.groupwise import PACK_COLUMNS
from modelmill.ops.moe_support import MoESupportRange

unavailable_reason = build.unavailable_reason
SUPPORTED_PROBLEMS = (MoESupportRange(weight_dtype=torch.uint8),)


def supports(inputs: FusedMoEInputs) -> bool:
    """Packed 4-bit codes in groups of whole runs, with or without offsets."""
    return (
        inputs.group > 0
        and inputs.group % PACK_COLUMNS == 0
        and experts.supports_moe_operands(inputs, torch.uint8)
        and experts.supports_scales_and_offsets(inputs, torch.float32, torch.float16)
    )


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """Run the op."""
    return experts.run_experts("int4_fused_moe", inputs)
