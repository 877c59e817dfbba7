"""Products of a few rows of clustered integers through the tensor cores (rptq_linear.cu)."""

from __future__ import annotations

import functools
import struct

import torch

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.cuda.common import build, launch
from modelmill.ops.cuda.weight_only_gemm import wq_gemv
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    DTYPE_DEFINES,
    K_TILE,
    THREADS,
    WqMmaKernelConfig,
    config_row_ranges,
    fits_shared_memory,
    log2_k_tiles_per_group,
)
from modelmill.ops.kernel_support import GemmProblem, GemmSupportRange, Kernel
from modelmill.ops.rptq_linear import DECLARATION, RptqLinearInputs

# rows of q up to … → how the kernel is compiled, for 8-bit and for 4-bit weights
KERNEL_CONFIGS = {
    torch.int8: (
        (8, WqMmaKernelConfig(1, 1, 1, 4)),
        (16, WqMmaKernelConfig(2, 1, 2, 2)),
        (32, WqMmaKernelConfig(4, 2, 2, 1)),
        (64, WqMmaKernelConfig(8, 4, 2, 1)),
    ),
    torch.uint8: (
        (8, WqMmaKernelConfig(1, 1, 2, 3)),
        (16, WqMmaKernelConfig(2, 1, 4, 2)),
        (32, WqMmaKernelConfig(4, 2, 2, 1)),
        (64, WqMmaKernelConfig(8, 4, 2, 1)),
    ),
}
MAX_ROWS = 64


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    form = config_for(1, torch.int8)
    common = _kernel_macros(
        torch.bfloat16, form, packed=False, offset=False, float32_scales=False, dynamic=False
    )
    return build.kernel_compile_failure_reason(device_type, "rptq_linear", common)


def config_for(tokens: int, dtype: torch.dtype) -> WqMmaKernelConfig:
    """How the kernel for so many rows of q and weights of this type is compiled."""
    return next(form for most, form in KERNEL_CONFIGS[dtype] if tokens <= most)


def _fits_mma_kernel(config: WqMmaKernelConfig, problem: GemmProblem) -> bool:
    """Whether groups are whole pieces, and a block's scales find room."""
    pieces = log2_k_tiles_per_group(problem.group, problem.k)
    return pieces is not None and fits_shared_memory(config, problem.groups)


# Groups of 128, 256, 512 … columns or of all.
SUPPORTED_PROBLEMS = tuple(
    GemmSupportRange(
        m=rows,
        k_multiple=K_TILE,
        weight_dtypes=(dtype,),
        out_dtypes=tuple(DTYPE_DEFINES),
        scale_dtypes=(torch.float16, torch.float32),
        fits=functools.partial(_fits_mma_kernel, config),
    )
    for dtype, configs in KERNEL_CONFIGS.items()
    for rows, config in config_row_ranges(configs)
)


def supports(inputs: RptqLinearInputs) -> bool:
    """Whether all are packed and aligned, the bias of the output's dtype."""
    q, weight, scale, offset, _, step, constant, bias, dtype = inputs
    packed = all(
        t is None or t.is_contiguous() for t in (q, weight, scale, offset, step, constant, bias)
    )
    aligned = q.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    alike = (bias is None or bias.dtype == dtype) and (
        offset is None or offset.dtype == scale.dtype
    )
    return packed and aligned and alike and q.is_cuda


def _supports_gemv(inputs: RptqLinearInputs) -> bool:
    return wq_gemv.supports_operands(*inputs[:4])


def _run_gemv(inputs: RptqLinearInputs) -> torch.Tensor:
    q, weight, scale, offset, group, step, constant, bias, dtype = inputs
    return wq_gemv.wq_gemv(q, weight, (scale, offset, group), (step, constant, bias), dtype)


def _run_mma(inputs: RptqLinearInputs) -> torch.Tensor:
    q, weight, scale, offset, group, step, constant, bias, dtype = inputs
    tokens, columns = q.shape
    rows, groups = weight.shape[0], scale.shape[1]
    out = torch.empty((tokens, rows), dtype=dtype, device=q.device)
    form = config_for(tokens, weight.dtype)
    with torch.cuda.device(q.device):
        macros = _kernel_macros(
            dtype, form, packed=weight.dtype is torch.uint8, offset=offset is not None,
            float32_scales=scale.dtype is torch.float32, dynamic=step.dim() == 2,
        )  # fmt: skip
        shared = form.shared_bytes(groups)
        kernel = launch.compile_and_load_kernel(
            "rptq_linear", "rptq_linear", macros, THREADS, shared, q.get_device()
        )
        pointers = launch.data_pointers(q, weight, scale, offset, step, constant, bias, out)
        counts = (tokens, rows, columns, groups, log2_k_tiles_per_group(group, columns))
        kernel.launch(form.grid(rows), struct.pack("=8Q5i4x", *pointers, *counts), pdl=True)
    return out


def _kernel_macros(
    dtype: torch.dtype, config: WqMmaKernelConfig,
    *, packed: bool, offset: bool, float32_scales: bool, dynamic: bool,
) -> tuple[str, ...]:  # fmt: skip
    switches = {
        "PACKED": packed,
        "OFFSET": offset,
        "SCALE_FP32": float32_scales,
        "DYNAMIC": dynamic,
        "GATED": False,
    }
    return (
        *config.macros,
        *(f"{name}={int(on)}" for name, on in switches.items()),
        *DTYPE_DEFINES[dtype],
    )


KERNELS = (
    Kernel(GemmSupportRange(m=(1, 1), fits=wq_gemv.supports_problem), _run_gemv, _supports_gemv),
    Kernel(GemmSupportRange(m=(1, MAX_ROWS)), _run_mma),
)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
