"""The experts of a mixture with 4-bit weights in groups of columns.

Computes: out[M, H] = Σ topk_weights · down(silu(gate) · up) (+ shared)
Dtypes: x and out bfloat16, float16 or float32; packed int4 codes; float32 sums
Layout: row-major; codes [E, N, K / 2] as in ops/int4_linear.py; scales and offsets [E, N, groups]
Range: any M; E ≤ 1024; I and H multiples of 32
Technique: pair by pair for few tokens (moe_decode_int4.py), else sorted tiles
    (grouped_gemm_int4.py)
Ops: int4_fused_moe
"""

from __future__ import annotations

import torch

from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.moe_support import MoESupportRange
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.moe import grouped_gemm_int4, moe_decode_int4
from modelmill.ops.triton.moe.experts import (
    PAIR_KERNEL_MAX_PAIRS_PER_EXPERT_4BIT,
    PAIR_KERNEL_MAX_TOKENS_4BIT,
    supports_moe_operands,
    uses_pair_kernel,
)

_PACK_COLUMNS = 32  # columns that are packed together

SUPPORTED_PROBLEMS = (MoESupportRange(weight_dtype=torch.uint8, ungated=False),)


def supports(inputs: FusedMoEInputs) -> bool:
    """Packed operands; grids of one layout; columns that need no padding."""
    inner, hidden = inputs.gate_up.shape[1] // 2, inputs.x.shape[-1]
    if not supports_moe_operands(inputs) or inner % _PACK_COLUMNS or hidden % _PACK_COLUMNS:
        return False
    if inputs.gate_up.dtype != torch.uint8 or inputs.down.dtype != torch.uint8:
        return False
    scales = (inputs.gate_up_scale, inputs.down_scale)
    offsets = (inputs.gate_up_offset, inputs.down_offset)
    return inputs.group % _PACK_COLUMNS == 0 and all(
        scale is not None
        and scale.is_contiguous()
        and (offset is None or (offset.is_contiguous() and offset.dtype == scale.dtype))
        for scale, offset in zip(scales, offsets, strict=True)
    )


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """Run the op."""
    return (moe_decode_int4 if uses_pair_kernel_4bit(inputs) else grouped_gemm_int4).run(inputs)


def uses_pair_kernel_4bit(inputs: FusedMoEInputs) -> bool:
    """``uses_pair_kernel`` for weights of 4 bits, up to as many tokens as it was timed with."""
    few = len(inputs.x) <= PAIR_KERNEL_MAX_TOKENS_4BIT and uses_pair_kernel(
        inputs, PAIR_KERNEL_MAX_PAIRS_PER_EXPERT_4BIT
    )
    return few or uses_pair_kernel(inputs)
