"""Products of a few rows of clustered integers through the tensor cores (rptq_linear.cu)."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda.common import build, launch
from modelmill.ops.cuda.weight_only_gemm import wq_gemv
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    K_TILE,
    THREADS,
    TYPES,
    WqMmaKernelConfig,
    fits_shared_memory,
    group_shift,
)
from modelmill.ops.rptq_linear import RptqLinearInputs

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


def available(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    form = config_for(1, torch.int8)
    common = _kernel_macros(
        torch.bfloat16, form, packed=False, offset=False, float32_scales=False, dynamic=False
    )
    return build.why_unavailable(device_type, "rptq_linear", common)


def config_for(tokens: int, dtype: torch.dtype) -> WqMmaKernelConfig:
    """How the kernel for so many rows of q and weights of this type is compiled."""
    return next(form for most, form in KERNEL_CONFIGS[dtype] if tokens <= most)


def supports(inputs: RptqLinearInputs) -> bool:
    """Whether the kernels serve these operands.

    Up to 64 rows, K a multiple of 128, groups of 128, 256, 512 … columns or of all,
    everything packed.
    """
    q, weight, scale, offset, group, step, constant, bias, dtype = inputs
    if q.dim() != 2 or not 0 < q.shape[0] <= MAX_ROWS or not q.is_cuda or dtype not in TYPES:
        return False
    packed = all(
        t is None or t.is_contiguous() for t in (q, weight, scale, offset, step, constant, bias)
    )
    aligned = (
        q.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
        and (bias is None or bias.dtype == dtype)
    )
    alike = scale.dtype in (torch.float16, torch.float32) and (
        offset is None or offset.dtype == scale.dtype
    )
    whole = q.shape[1] % K_TILE == 0 and group_shift(group, q.shape[1]) is not None
    return (
        packed
        and aligned
        and alike
        and whole
        and fits_shared_memory(config_for(q.shape[0], weight.dtype), scale.shape[1])
    )


def run(inputs: RptqLinearInputs) -> torch.Tensor:
    """Compute the op with the CUDA kernel; same contract as the reference."""
    q, weight, scale, offset, group, step, constant, bias, dtype = inputs
    tokens, columns = q.shape
    rows, groups = weight.shape[0], scale.shape[1]
    if wq_gemv.supports_weight(q, weight, scale, offset, group):
        return wq_gemv.wq_gemv(q, weight, (scale, offset, group), (step, constant, bias), dtype)
    out = torch.empty((tokens, rows), dtype=dtype, device=q.device)
    form = config_for(tokens, weight.dtype)
    with torch.cuda.device(q.device):
        macros = _kernel_macros(
            dtype, form, packed=weight.dtype is torch.uint8, offset=offset is not None,
            float32_scales=scale.dtype is torch.float32, dynamic=step.dim() == 2,
        )  # fmt: skip
        shared = form.shared_bytes(groups)
        kernel = launch.load_kernel(
            "rptq_linear", "rptq_linear", macros, THREADS, shared, q.get_device()
        )
        pointers = launch.data_pointers(q, weight, scale, offset, step, constant, bias, out)
        counts = (tokens, rows, columns, groups, group_shift(group, columns))
        kernel.launch(form.grid(rows), struct.pack("=8Q5i4x", *pointers, *counts), pdl=True)
    return out


def _kernel_macros(
    dtype: torch.dtype,
    config: WqMmaKernelConfig,
    *,
    packed: bool,
    offset: bool,
    float32_scales: bool,
    dynamic: bool,
) -> tuple[str, ...]:
    switches = {
        "PACKED": packed,
        "OFFSET": offset,
        "SCALE_FP32": float32_scales,
        "DYNAMIC": dynamic,
        "GATED": False,
    }
    return (*config.macros, *(f"{name}={int(on)}" for name, on in switches.items()), *TYPES[dtype])
