"""The experts of a mixture with weights and activations in fp8 (e4m3).

Computes: out[M, H] = Σ topk_weights · down(quantize(silu(gate) · up)) (+ shared), of quantize(x)
Dtypes: x and out bfloat16, float16 or float32; e4m3 weights, float32 scales
Layout: row-major; weights [E, N, K], scales [E, N]
Range: any M; E ≤ 1024
Technique: rows quantized by quantize.py; pairs (moe_decode.py) or sorted tiles (grouped_gemm.py)
Ops: fp8_fused_moe
"""

from __future__ import annotations

import torch

from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.triton.common.device import supports_fp8
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.moe import experts
from modelmill.ops.triton.moe.experts import has_8bit_weights_and_scales, supports_moe_operands


def supports(inputs: FusedMoEInputs) -> bool:
    """Packed operands; fp8 (e4m3) weights with float32 scales."""
    supported = supports_moe_operands(inputs, ungated=True) and has_8bit_weights_and_scales(
        inputs, torch.float8_e4m3fn
    )
    return supported and supports_fp8(inputs.x.device)


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """Run the op."""
    return experts.run(inputs, torch.float8_e4m3fn)
