"""Groupwise int8 linear of a few rows on tensor cores (int8_gemm_small_m.py)."""

from __future__ import annotations

import torch

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.cuda.common import build
from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m, weight_only, wq_gemm_pipelined
from modelmill.ops.cuda.weight_only_gemm.int8_gemm_small_m import (
    SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS,
)
from modelmill.ops.cuda.weight_only_gemm.int8_gemm_small_m import supports as supports
from modelmill.ops.int8_group_linear import DECLARATION


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    form = weight_only.config_for(1)
    common = int8_gemm_small_m.kernel_macros(
        torch.bfloat16, form, weight_only.K_TILE, offset=False, float32_scales=False, gated=False
    )
    return build.kernel_compile_failure_reason(device_type, "int8_gemm_small_m", common)


warmup_sizes = wq_gemm_pipelined.warmup_sizes
KERNELS = int8_gemm_small_m.list_kernels_by_preference(gated=False)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
