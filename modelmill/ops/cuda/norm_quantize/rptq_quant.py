"""Rows to clustered integers, their columns exchanged in shared memory (rptq_quant.cu)."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda.common import build, launch
from modelmill.ops.cuda.weight_only_gemm.weight_only import DTYPE_DEFINES
from modelmill.ops.kernel_support import HALF_DTYPES, UNBOUNDED
from modelmill.ops.row_op_support import RowOpProblem, RowOpSupportRange
from modelmill.ops.rptq_quant import RptqQuantInputs

# rows: with 64 x 4,096 Triton's kernel is faster on an H200, with thousands a tenth as fast
MIN_ROWS = 128
_TOKENS_PER_BLOCK, _THREADS, _MAX_SHARED_BYTES = 4, 512, 224 << 10


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    return build.kernel_compile_failure_reason(
        device_type,
        "rptq_quant",
        kernel_macros(torch.bfloat16, 128, gated=False, dynamic=True, has_zero_point=False),
    )


def _supports_problem(problem: RowOpProblem) -> bool:
    """Whether widths are in fours and rows fit shared memory; dynamic steps need groups of 2^n."""
    width, columns = problem.width // (2 if problem.gated else 1), problem.out_columns
    group = problem.group
    grouped = not group or (columns % group == 0 and (group in (32, 64) or group % 128 == 0))
    fours = width % 4 == 0 and columns % 4 == 0
    return grouped and fours and width * 2 * _TOKENS_PER_BLOCK <= _MAX_SHARED_BYTES


SUPPORTED_PROBLEMS = (
    RowOpSupportRange(
        m=(MIN_ROWS, UNBOUNDED),
        on_gpu=True,
        dtypes=HALF_DTYPES,
        dims=(2, 2),
        fits=_supports_problem,
    ),
)


def supports(inputs: RptqQuantInputs) -> bool:
    """Whether rows and tables are packed and aligned; a scale for each column."""
    x, perm, inv_scale, zero_point = inputs[:4]
    tables = [each for each in (perm, inv_scale, zero_point) if each is not None]
    packed = all(
        each.is_contiguous() and each.numel() == perm.numel() and each.data_ptr() % 16 == 0
        for each in tables
    )
    steps = inputs.group_step
    packed = packed and (steps is None or (zero_point is not None and steps.is_contiguous()))
    return packed and x.stride(1) == 1 and x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0


def run(inputs: RptqQuantInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the op with the CUDA kernel; same contract as the reference."""
    x, perm, inv_scale, zero_point, bits, group, gated, group_step = inputs
    fallback = group_step is not None
    rows, columns, own = x.shape[0], perm.numel(), fallback or inv_scale is None
    width = x.shape[1] // (2 if gated else 1)
    q = torch.empty((rows, columns), dtype=torch.int8, device=x.device)
    step = (
        torch.empty((rows, columns // group), dtype=torch.float32, device=x.device) if own else None
    )
    with torch.cuda.device(x.device):
        macros = kernel_macros(
            x.dtype,
            group,
            gated=gated,
            dynamic=own,
            has_zero_point=zero_point is not None,
            fallback=fallback,
        )
        shared = width * 2 * _TOKENS_PER_BLOCK
        kernel = launch.compile_and_load_kernel(
            "rptq_quant", "rptq_quant", macros, _THREADS, shared, x.get_device()
        )
        pointers = launch.data_pointers(x, perm, inv_scale, zero_point, q, step, group_step)
        counts = (x.stride(0), rows, width, columns, group, float(2 ** (bits - 1) - 1))
        kernel.launch(
            -(-rows // _TOKENS_PER_BLOCK), struct.pack("=7Qq4if4x", *pointers, *counts), pdl=True
        )
    return q, step


def kernel_macros(
    dtype: torch.dtype,
    group: int,
    *,
    gated: bool,
    dynamic: bool,
    has_zero_point: bool,
    fallback: bool = False,
) -> tuple[str, ...]:
    """Macros of the kernel."""
    sizes = {
        "GATED": gated,
        "DYNAMIC": dynamic,
        "FALLBACK": fallback,
        "ZERO_POINTS": has_zero_point,
        "LANES": min(group, 128) // 4 if dynamic else 32,
    }
    return (*(f"{name}={int(size)}" for name, size in sizes.items()), *DTYPE_DEFINES[dtype])
