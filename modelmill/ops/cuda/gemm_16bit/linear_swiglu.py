"""Fused 16-bit SwiGLU by TMA and wgmma, for a few rows and for prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from modelmill.ops.binding import run_first_supported
from modelmill.ops.cuda.gemm_16bit import gemm
from modelmill.ops.cuda.gemm_16bit.linear import available as available
from modelmill.ops.kernel_range import GemmRange, Kernel
from modelmill.ops.linear_swiglu import DECLARATION

specializations = gemm.large_m_warmup_rows


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Operands that TMA can read, in 16 bits."""
    return gemm.supports_operands(x, weight, bias)


def _swiglu(
    kernel: Callable[..., None],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    kernel(x, weight, bias, out)
    return out


# Sums in float32, the products rounded before the gate.
SUPPORTED_PROBLEMS = (*gemm.small_m_ranges(n_multiple=4), gemm.LARGE_M_RANGE)
KERNELS = (
    Kernel(GemmRange(m=(1, gemm.SMALL_M_MAX_ROWS)), functools.partial(_swiglu, gemm.gemm_small_m)),
    Kernel(GemmRange(), functools.partial(_swiglu, gemm.gemm_swiglu_large_m)),
)
run = run_first_supported(KERNELS, DECLARATION)
