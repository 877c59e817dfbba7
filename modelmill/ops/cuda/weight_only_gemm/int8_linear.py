"""Products of a few rows with int8 weights through the tensor cores (int8_gemm_small_m.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.binding import run_first_supported
from modelmill.ops.cuda.common import build
from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m, wq_gemm_pipelined, wq_gemv
from modelmill.ops.cuda.weight_only_gemm.int8_gemm_small_m import (
    SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.int8_linear import DECLARATION
from modelmill.ops.kernel_range import Kernel


def available(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    common = wq_gemv.WqGemvSpec(8, int8_input=False, offset=False, float32_scales=True)
    plan = wq_gemv.plan_launch(common, (4096, 4096), 4096, 1, torch.bfloat16, gated=False)
    return build.why_unavailable(device_type, "wq_gemv", plan.macros)


def _as_single_group(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> GroupwiseLinearInputs:
    """The operands as those of groups of all columns."""
    return GroupwiseLinearInputs(x, weight, scale, None, x.shape[-1], bias)


def _per_channel_adapter(call: Callable[[GroupwiseLinearInputs], Any]) -> Callable[..., Any]:
    """A function of groups as one of this op's arguments."""
    return lambda *args: call(_as_single_group(*args))


def supports(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """As ``int8_gemm_small_m.supports``."""
    return int8_gemm_small_m.supports(_as_single_group(x, weight, scale, bias))


def kernels(*, gated: bool) -> tuple[Kernel, ...]:
    """The integers in x's dtype, sums, scale and bias in float32."""
    return tuple(
        Kernel(
            each.range,
            _per_channel_adapter(each.run),
            None if each.supports is None else _per_channel_adapter(each.supports),
        )
        for each in int8_gemm_small_m.kernels(gated=gated)
    )


specializations = wq_gemm_pipelined.specializations
KERNELS = kernels(gated=False)
run = run_first_supported(KERNELS, DECLARATION)
