"""Products of int8 with int8 on tensor cores; one token with dp4a instructions."""

from __future__ import annotations

import torch

from modelmill.ops.kernel_support import GemmSupportRange
from modelmill.ops.triton.common import launch_configs
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.launch_configs import GemmKey, LaunchConfig, TunedConfigs
from modelmill.ops.triton.common.launch_configs import gemm_key as gemm_key
from modelmill.ops.triton.w8a8_gemm.gemm_8bit import gemm_8bit
from modelmill.ops.w8a8_linear import Linear8BitInputs

SUPPORTED_PROBLEMS = (
    GemmSupportRange(
        dtypes=(torch.int8,), weight_dtypes=(torch.int8,), scale_dtypes=(torch.float32,)
    ),
)


def supports(inputs: Linear8BitInputs) -> bool:
    """Contiguous rows of x and weight; contiguous float32 scales."""
    x, weight, scale, x_scale, dtype, _ = inputs
    if not x.shape[1] or not weight.numel() or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    if x_scale is None or x_scale.dtype != torch.float32 or dtype == torch.float64:
        return False
    return scale.is_contiguous() and x_scale.is_contiguous()


def candidates(key: GemmKey) -> tuple[LaunchConfig, ...]:
    """The launch configs that may be chosen for a product."""
    return launch_configs.candidates_8bit(key)


def run(inputs: Linear8BitInputs, *, configs: TunedConfigs | None = None) -> torch.Tensor:
    """Run the op.

    configs: autotuned launch configs of this device; others are defaults.
    """
    return gemm_8bit(inputs, configs)
