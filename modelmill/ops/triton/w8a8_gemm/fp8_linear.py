"""Products with fp8 weights: fp8 activations on fp8 tensor cores, others with converted weights.

Many tokens of fp8 use torch's row-scaled product where it supports the shapes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from modelmill.ops.kernel_support import GemmSupportRange
from modelmill.ops.triton.common import launch_configs
from modelmill.ops.triton.common.device import FUSED_DEQUANT_GEMM_RANGES, supports_fp8
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.launch_configs import GemmKey, LaunchConfig, TunedConfigs
from modelmill.ops.triton.common.launch_configs import gemm_key as gemm_key
from modelmill.ops.triton.gemm_16bit.linear import gemm
from modelmill.ops.triton.w8a8_gemm.gemm_8bit import gemm_8bit
from modelmill.ops.w8a8_linear import Linear8BitInputs

FP8 = torch.float8_e4m3fn
SCALED_MM_MIN_ROWS = 256  # tokens from which torch's product is used


# fp8 activations, or floating-point ones that are multiplied by converted weights
SUPPORTED_PROBLEMS = tuple(
    replace(each, weight_dtypes=(FP8,), scale_dtypes=(torch.float32,))
    for each in (GemmSupportRange(dtypes=(FP8,)), *FUSED_DEQUANT_GEMM_RANGES)
)


def supports(inputs: Linear8BitInputs) -> bool:
    """Device with fp8; contiguous rows of x and weight; contiguous float32 scales."""
    x, weight, scale, x_scale, dtype, _ = inputs
    if not x.shape[1] or not weight.numel() or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    if not scale.is_contiguous() or not supports_fp8(x.device):
        return False
    if x_scale is None:
        return x.dtype == dtype != FP8
    floats = x_scale.dtype == torch.float32 and x_scale.is_contiguous()
    return floats and x.dtype == FP8 and dtype != torch.float64


def candidates(key: GemmKey) -> tuple[LaunchConfig, ...]:
    """The launch configs that may be chosen for a product."""
    return launch_configs.candidates_8bit(key)


def run(inputs: Linear8BitInputs, *, configs: TunedConfigs | None = None) -> torch.Tensor:
    """Run the op; sums in float32, fp8 sums as precise as the tensor cores accumulate them."""
    x, weight, scale, x_scale, dtype, bias = inputs
    if x_scale is not None and _supports_scaled_mm(x, weight, dtype):
        row_scale = x_scale.expand(x.shape[0]).reshape(-1, 1).contiguous()
        return torch._scaled_mm(
            x,
            weight.t(),
            scale_a=row_scale,
            scale_b=scale.view(1, -1),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    if x_scale is not None:
        return gemm_8bit(inputs, configs)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    gemm(x, weight, scale, bias, out)
    return out


def _supports_scaled_mm(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's row-scaled product can be used: Hopper, bfloat16 output, multiples of 16."""
    if not x.is_cuda or x.shape[0] < SCALED_MM_MIN_ROWS or dtype != torch.bfloat16:
        return False
    packed = (
        x.is_contiguous()
        and weight.is_contiguous()
        and weight.shape[0] % 16 == 0
        and x.shape[1] % 16 == 0
    )
    return packed and torch.cuda.get_device_capability(x.device) == (9, 0)
