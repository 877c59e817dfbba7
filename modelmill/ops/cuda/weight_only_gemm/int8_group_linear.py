"""Groupwise int8 linear of a few rows on tensor cores (int8_gemm_small_m.py)."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.common import build
from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m
from modelmill.ops.cuda.weight_only_gemm.weight_only import K_TILE


def available(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    form = int8_gemm_small_m.config_for(1)
    common = int8_gemm_small_m.kernel_macros(
        torch.bfloat16, form, K_TILE, offset=False, float32_scales=False, gated=False
    )
    return build.why_unavailable(device_type, "int8_gemm_small_m", common)


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> bool:
    """Whether the kernels serve these operands.

    Up to 64 rows in 16 bits, K a multiple of 32, groups of 32, 64, 128, 256 … columns or of
    all; all packed.
    """
    return int8_gemm_small_m.supports_weight(x, weight, (scale, offset, group), bias)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; sums in float32."""
    return int8_gemm_small_m.int8_gemm(x, weight, (scale, offset, group), bias, gated=False)
