"""RPTQ integer linear in C++ (rptq_linear.cpp): AVX-512 VNNI or portable integers."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import GemmFunction
from modelmill.ops.rptq_linear import RptqLinearInputs, rptq_linear

unavailable_reason = build.unavailable_reason
_gemm = GemmFunction("rptq_linear", "ppppppppqqqqiiii")
_MAX_GROUP = 1 << 16  # columns whose sum of 255 · 128 stays below 2³¹


def run(inputs: RptqLinearInputs) -> torch.Tensor:
    """Compute the op on the CPU; same contract as the reference."""
    q, weight, scale, offset, group, step, constant, bias, dtype = inputs
    grids = [t for t in (scale, offset) if t is not None]
    packed = weight.dtype is torch.uint8
    operands = (q, weight, step, *grids, *(t for t in (constant, bias) if t is not None))
    fits = (
        all(t.is_contiguous() for t in operands)
        and group % 32 == 0
        and group <= _MAX_GROUP
        and q.dim() == 2
    )
    fits = fits and all(
        t.dtype is scale.dtype and t.dtype in (torch.float16, torch.float32) for t in grids
    )
    fits = (
        fits
        and step.dtype is torch.float32
        and (constant is None or constant.dtype is torch.float32)
    )
    if not fits or dtype not in build.DTYPE_CODES or (bias is not None and bias.dtype is not dtype):
        return rptq_linear(inputs)
    sizes = (*q.shape, weight.shape[0], group)
    flags = (scale.dtype is torch.float16, packed, step.dim() == 2)
    return _gemm((q, weight, scale, offset, step, constant, bias), sizes, dtype, *flags)
