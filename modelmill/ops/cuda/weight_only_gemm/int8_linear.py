"""Products of a few rows with int8 weights through the tensor cores (int8_gemm_small_m.py)."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.common import build
from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m, wq_gemv


def available(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    common = wq_gemv.WqGemvSpec(8, int8_input=False, offset=False, float32_scales=True)
    plan = wq_gemv.plan_launch(common, (4096, 4096), 4096, 1, torch.bfloat16, gated=False)
    return build.why_unavailable(device_type, "wq_gemv", plan.macros)


def supports(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """Up to 64 rows in 16 bits, K a multiple of 32, everything packed."""
    return int8_gemm_small_m.supports_weight(x, weight, (scale, None, weight.shape[1]), bias)


def run(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the reference: the integers in x's dtype, sums, scale and bias in float32."""
    return int8_gemm_small_m.int8_gemm(x, weight, (scale, None, x.shape[1]), bias, gated=False)
