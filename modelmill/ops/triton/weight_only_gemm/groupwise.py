"""Products with group-wise weights: what is common to all code widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from modelmill.ops.groupwise import PACK_COLUMNS, GroupwiseLinearInputs
from modelmill.ops.kernel_support import GemmSupportRange, Kernel
from modelmill.ops.triton.common.device import FUSED_DEQUANT_GEMM_RANGES
from modelmill.ops.triton.weight_only_gemm.dequant import multiply_dequantized

SUPPORTED_PROBLEMS = tuple(
    replace(each, group_multiple=PACK_COLUMNS) for each in FUSED_DEQUANT_GEMM_RANGES
)

# (maximum rows of x, tokens per program, weight rows per program, stages, warps)
LAUNCH_CONFIGS = ((16, 16, 16, 6, 4), (32, 32, 64, 4, 4), (64, 64, 64, 4, 4))
MAX_ROWS = LAUNCH_CONFIGS[-1][0]


def supports(inputs: GroupwiseLinearInputs) -> bool:
    """Contiguous rows of x, weight and grids."""
    x, weight, scale, offset = inputs[:4]
    if not x.shape[1] or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    return scale.stride(1) == 1 and (offset is None or offset.stride() == scale.stride())


def launch_config(tokens: int) -> tuple[int, int, int, int]:
    """(tokens per program, weight rows per program, stages, warps) up to ``MAX_ROWS`` rows."""
    return next(config[1:] for config in LAUNCH_CONFIGS if tokens <= config[0])


def make_kernels(
    gemm: Callable[[GroupwiseLinearInputs, torch.Tensor], None],
    dequantize: Callable[[GroupwiseLinearInputs], torch.Tensor],
) -> tuple[Kernel, ...]:
    """``gemm`` into out up to ``MAX_ROWS`` rows; cuBLAS with the dequantized weight for more."""

    def multiply_few(inputs: GroupwiseLinearInputs) -> torch.Tensor:
        x = inputs.x
        out = torch.empty((len(x), len(inputs.weight)), dtype=x.dtype, device=x.device)
        gemm(inputs, out)
        return out

    def multiply(inputs: GroupwiseLinearInputs) -> torch.Tensor:
        return multiply_dequantized(inputs, dequantize(inputs))

    return (
        Kernel(GemmSupportRange(m=(1, MAX_ROWS)), multiply_few),
        Kernel(GemmSupportRange(), multiply),
    )
