"""Products with int8 weights: converted in registers, scaled once at the end.

From DEQUANT_MIN_ROWS rows on the weight is dequantized to x's dtype for cuBLAS (``dequant.py``).
"""

from __future__ import annotations

import torch

from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.triton.common import launch_configs
from modelmill.ops.triton.common.device import FUSED_DEQUANT_GEMM_RANGES
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.launch_configs import GemmKey, LaunchConfig, TunedConfigs
from modelmill.ops.triton.common.launch_configs import gemm_key as gemm_key
from modelmill.ops.triton.gemm_16bit.linear import gemm
from modelmill.ops.triton.weight_only_gemm.dequant import dequantize, multiply_dequantized

DEQUANT_MIN_ROWS = 193


SUPPORTED_PROBLEMS = FUSED_DEQUANT_GEMM_RANGES


def supports(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """Contiguous rows of x and weight."""
    return x.stride(1) == 1 and weight.stride(1) == 1


def candidates(key: GemmKey) -> tuple[LaunchConfig, ...]:
    """The launch configs that may be chosen for a product."""
    return launch_configs.candidates(key, 1)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    configs: TunedConfigs | None = None,
) -> torch.Tensor:
    """Run the op with float32 sums.

    The integers are multiplied in x's dtype, then scale and bias are applied; with many rows the
    weight is scaled first.
    """
    if x.shape[0] >= DEQUANT_MIN_ROWS:
        one_group = GroupwiseLinearInputs(x, weight, scale, None, x.shape[1], bias)
        return multiply_dequantized(one_group, dequantize(one_group))
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    gemm(x, weight, scale, bias, out, configs)
    return out
