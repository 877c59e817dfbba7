"""RMSNorm to permuted 8-bit values (rmsnorm_quant_permute.cu).

All other cases are served by Triton.
"""

from __future__ import annotations

import torch

from modelmill.ops.cuda.common.build import unavailable_reason as unavailable_reason
from modelmill.ops.cuda.norm_quantize import rmsnorm_quant_permute
from modelmill.ops.cuda.norm_quantize.rmsnorm_quant_permute import (
    SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS,
)
from modelmill.ops.cuda.norm_quantize.rmsnorm_quant_permute import supports as supports
from modelmill.ops.quant_types import ActQuantSpec


def run(
    x: torch.Tensor, weight: torch.Tensor, eps: float, spec: ActQuantSpec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the op with the CUDA kernel; same contract as the reference."""
    return rmsnorm_quant_permute.rms_norm_quant(x, None, weight, eps, spec)
