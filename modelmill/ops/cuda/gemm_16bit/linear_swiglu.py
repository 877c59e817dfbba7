"""Fused 16-bit SwiGLU by TMA and wgmma, for a few rows and for prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.cuda.gemm_16bit import gemm
from modelmill.ops.cuda.gemm_16bit.linear import unavailable_reason as unavailable_reason
from modelmill.ops.kernel_support import GemmSupportRange, Kernel
from modelmill.ops.linear_swiglu import DECLARATION

warmup_sizes = gemm.large_m_warmup_rows


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
SUPPORTED_PROBLEMS = (*gemm.small_m_support_ranges(n_multiple=4), gemm.LARGE_M_RANGE)
KERNELS = (
    Kernel(
        GemmSupportRange(m=(1, gemm.SMALL_M_MAX_ROWS)),
        functools.partial(_swiglu, gemm.gemm_small_m),
    ),
    Kernel(GemmSupportRange(), functools.partial(_swiglu, gemm.gemm_swiglu_large_m)),
)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
