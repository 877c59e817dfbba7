"""The experts of a mixture with int8 weights.

Computes: out[M, H] = Σ topk_weights · down(silu(gate) · up) (+ shared), or
    down(relu²(up)) of experts without a gate
Dtypes: x and out bfloat16, float16 or float32; int8 weights, float32 scales and sums
Layout: row-major; weights [E, N, K], scales [E, N]
Range: any M; E ≤ 1024
Technique: pair by pair for few tokens (moe_decode.py), else sorted tiles (grouped_gemm.py)
Ops: int8_fused_moe
"""

from __future__ import annotations

import torch

from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.moe_support import MoESupportRange
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.moe.experts import has_8bit_weights_and_scales, supports_moe_operands
from modelmill.ops.triton.moe.experts import run as run

SUPPORTED_PROBLEMS = (MoESupportRange(weight_dtype=torch.int8),)


def supports(inputs: FusedMoEInputs) -> bool:
    """Packed operands; int8 weights with float32 scales."""
    return supports_moe_operands(inputs, ungated=True) and has_8bit_weights_and_scales(
        inputs, torch.int8
    )
