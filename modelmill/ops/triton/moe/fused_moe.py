"""The experts of a mixture with weights of x's dtype.

Computes: out[M, H] = Σ topk_weights · down(silu(gate) · up) (+ shared), or
    down(relu²(up)) of experts without a gate
Dtypes: x, weights and out bfloat16, float16 or float32; float32 sums
Layout: row-major; weights [E, N, K]
Range: any M; E ≤ 1024
Technique: pair by pair for few tokens (moe_decode.py), else sorted tiles (grouped_gemm.py)
Ops: fused_moe
"""

from __future__ import annotations

from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.moe.experts import run as run
from modelmill.ops.triton.moe.experts import supports_moe_operands


def supports(inputs: FusedMoEInputs) -> bool:
    """Packed operands of one dtype."""
    dtype = inputs.x.dtype
    return (
        supports_moe_operands(inputs, ungated=True)
        and inputs.gate_up.dtype == inputs.down.dtype == dtype
    )
