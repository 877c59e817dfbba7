"""Products of a few rows with int8 weights through the tensor cores (int8_gemm_small_m.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.cuda.common import build
from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m, wq_gemm_pipelined, wq_gemv
from modelmill.ops.cuda.weight_only_gemm.int8_gemm_small_m import (
    SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.int8_linear import DECLARATION
from modelmill.ops.kernel_support import Kernel


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    common = wq_gemv.WqGemvSpec(8, int8_input=False, offset=False, float32_scales=True)
    plan = wq_gemv.plan_launch(common, (4096, 4096), 4096, 1, torch.bfloat16, gated=False)
    return build.kernel_compile_failure_reason(device_type, "wq_gemv", plan.macros)


def _as_single_group(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> GroupwiseLinearInputs:
    """The operands as those of groups of all columns."""
    return GroupwiseLinearInputs(x, weight, scale, None, x.shape[-1], bias)


def _adapt_groupwise_function(call: Callable[[GroupwiseLinearInputs], Any]) -> Callable[..., Any]:
    """A function of groups as one of this op's arguments."""
    return lambda *args: call(_as_single_group(*args))


def supports(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """As ``int8_gemm_small_m.supports``."""
    return int8_gemm_small_m.supports(_as_single_group(x, weight, scale, bias))


def list_kernels_by_preference(*, gated: bool) -> tuple[Kernel, ...]:
    """The integers in x's dtype, sums, scale and bias in float32."""
    return tuple(
        Kernel(
            each.range,
            _adapt_groupwise_function(each.run),
            None if each.supports is None else _adapt_groupwise_function(each.supports),
        )
        for each in int8_gemm_small_m.list_kernels_by_preference(gated=gated)
    )


warmup_sizes = wq_gemm_pipelined.warmup_sizes
KERNELS = list_kernels_by_preference(gated=False)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
