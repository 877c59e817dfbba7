"""Products of int8 with int8 on tensor cores; one token with dp4a instructions."""

from __future__ import annotations

import torch

from modelmill.ops.triton.common import launch_configs
from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.common.launch_configs import GemmKey, LaunchConfig, TunedConfigs
from modelmill.ops.triton.common.launch_configs import gemm_key as gemm_key
from modelmill.ops.triton.w8a8_gemm.gemm_8bit import gemm_8bit, gemv_8bit, is_word_aligned


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:
    """Any number of rows; contiguous rows of x and weight; contiguous float32 scales."""
    if (
        x.dim() != 2
        or not x.numel()
        or not weight.numel()
        or x.stride(1) != 1
        or weight.stride(1) != 1
    ):
        return False
    floats = all(s.dtype == torch.float32 and s.is_contiguous() for s in (scale, x_scale))
    return floats and x.dtype == weight.dtype == torch.int8 and dtype != torch.float64


def candidates(key: GemmKey) -> tuple[LaunchConfig, ...]:
    """The launch configs that may be chosen for a product."""
    return launch_configs.candidates_8bit(key)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    configs: TunedConfigs | None = None,
) -> torch.Tensor:
    """Run the op.

    configs: autotuned launch configs of this device; others are defaults.
    """
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    if is_word_aligned(x, weight):
        gemv_8bit(x, weight, scale, x_scale, bias, out, configs)
    else:
        gemm_8bit(x, weight, scale, x_scale, bias, out, configs)
    return out
