"""16-bit linear of up to 64 rows by TMA and wgmma where faster than Triton and cuBLAS."""

from __future__ import annotations

import torch

from modelmill.ops.cuda.common import build
from modelmill.ops.cuda.gemm_16bit import gemm

SUPPORTED_PROBLEMS = gemm.small_m_support_ranges(n_multiple=2)


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles one config (cached on disk).
    """
    sizes = gemm.small_m_config(8, 4096, 132, gated=False)
    return build.kernel_compile_failure_reason(
        device_type, "gemm_small_m", sizes.macros(torch.bfloat16, gated=False)
    )


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Operands that TMA can read, in 16 bits."""
    return gemm.supports_operands(x, weight, bias)


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, sums in float32."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    gemm.gemm_small_m(x, weight, bias, out)
    return out
