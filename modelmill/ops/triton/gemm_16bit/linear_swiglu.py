"""Gate and up projections for decoding, in one kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from modelmill.ops.kernel_support import HALF_AND_FLOAT64_DTYPES, GemmSupportRange
from modelmill.ops.triton.common import launch_configs
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.launch_configs import GemmKey, LaunchConfig, TunedConfigs
from modelmill.ops.triton.common.launch_configs import gemm_key as gemm_key
from modelmill.ops.triton.gemm_16bit.linear import MAX_ROWS, gemm
from modelmill.ops.triton.gemm_16bit.linear import supports as supports
from modelmill.ops.triton.norm_quantize import silu_mul

SUPPORTED_PROBLEMS = (GemmSupportRange(m=(1, 1)), GemmSupportRange(dtypes=HALF_AND_FLOAT64_DTYPES))


def candidates(key: GemmKey) -> tuple[LaunchConfig, ...]:
    """The launch configs that may be chosen for a product; none where cuBLAS is used."""
    return launch_configs.candidates(key, key[3].itemsize, gated=True) if key[0] <= MAX_ROWS else ()


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    *, configs: TunedConfigs | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the op with float32 sums; many rows use cuBLAS and a separate SwiGLU kernel."""
    if x.shape[0] > MAX_ROWS:
        return silu_mul.run(F.linear(x, weight, bias))
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    gemm(x, weight, None, bias, out, configs)
    return out
