"""The rates of a recurrence's heads in float32, without copies of x or the weight in float32.

Computes: out[M, N] = x[M, K] · weight[N, K]ᵀ
Dtypes: x and weight bfloat16, float16 or (M ≤ 16) float32; out float32; float32 sums
Layout: row-major, contiguous rows
Range: any M (float32: M ≤ 16)
Technique: that of router_gemm.py
Ops: head_projection
"""

from __future__ import annotations

from modelmill.ops.triton.moe.router_gemm import run as run
from modelmill.ops.triton.moe.router_gemm import supports as supports
from modelmill.ops.triton.moe.router_gemm import unavailable_reason as unavailable_reason
