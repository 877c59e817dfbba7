"""The experts of a mixture with MXFP4 weights.

Computes: out[M, H] = Σ topk_weights · down(act(gate) · up) (+ shared)
Dtypes: x and out bfloat16, float32 or (few tokens) float16; packed e2m1 codes; e8m0 scales; float32
    sums
Layout: row-major; codes [E, N, K / 2] as in ops/int4_linear.py; scales [E, N, K / 32]
Range: any M; E ≤ 1024; I and H multiples of 32
Technique: pair by pair for few tokens (moe_decode_int4.py), else sorted tiles
    (grouped_gemm_int4.py)
Ops: mxfp4_fused_moe

Products of many tokens take the weights in x's dtype. In float16 they may be out of range: there
the torch reference computes.
"""

from __future__ import annotations

import torch

from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.moe_support import MoESupportRange
from modelmill.ops.mxfp4_fused_moe import BLOCK_COLUMNS
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.moe import int4_fused_moe
from modelmill.ops.triton.moe.int4_fused_moe import run as run

SUPPORTED_PROBLEMS = (MoESupportRange(weight_dtype=torch.uint8, ungated=False),)


def supports(inputs: FusedMoEInputs) -> bool:
    """Packed operands of whole blocks, and a dtype that holds their values."""
    scales = (inputs.gate_up_scale, inputs.down_scale)
    return (
        int4_fused_moe.supports(inputs)
        and inputs.group == BLOCK_COLUMNS
        and all(scale is not None and scale.dtype == torch.uint8 for scale in scales)
        and (inputs.x.dtype != torch.float16 or int4_fused_moe.uses_pair_kernel_4bit(inputs))
    )
