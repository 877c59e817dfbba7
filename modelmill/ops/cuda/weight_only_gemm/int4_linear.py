"""Products of a few rows with 4-bit weights through the tensor cores (int4_linear.cu)."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda.common import build, launch
from modelmill.ops.cuda.weight_only_gemm import int4_gemm_small_m, wq_gemm_pipelined, wq_gemv
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    K_TILE,
    RUN,
    THREADS,
    TYPES,
    WqMmaKernelConfig,
    fits_shared_memory,
    group_shift,
    k_tile_for,
)

# rows of x up to … → how the kernel is compiled: with many rows a block takes more of N, as x is
# read by each
KERNEL_CONFIGS = (
    (8, WqMmaKernelConfig(1, 1, 2, 3)),
    (16, WqMmaKernelConfig(2, 1, 2, 2)),
    (32, WqMmaKernelConfig(4, 2, 2, 1)),
    (64, WqMmaKernelConfig(8, 4, 1, 1)),
)
MAX_ROWS = KERNEL_CONFIGS[-1][0]
# rows; more of them go through shared memory (wq_gemm_pipelined, int4_gemm_small_m)
MMA_MAX_ROWS = 8


def available(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    common = _kernel_macros(torch.bfloat16, config_for(1), K_TILE, offset=True, gated=False)
    return build.why_unavailable(device_type, "int4_linear", common)


def config_for(tokens: int) -> WqMmaKernelConfig:
    """How the kernel for so many rows of x is compiled."""
    return next(form for most, form in KERNEL_CONFIGS if tokens <= most)


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> bool:
    """Whether the kernels serve these operands.

    Up to 64 rows in 16 bits, K a multiple of 32, groups of 32, 64, 128, 256 … columns or of
    all, float16 scales.
    """
    if x.dim() != 2 or not 0 < x.shape[0] <= MAX_ROWS or x.dtype.itemsize != 2 or not x.is_cuda:
        return False
    grids = [t for t in (scale, offset) if t is not None]
    packed = (
        all(t.dtype == torch.float16 and t.is_contiguous() for t in grids)
        and weight.is_contiguous()
    )
    aligned = (
        x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )
    biased = bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    columns = x.shape[1]
    whole = (
        group_shift(group, columns, k_tile_for(group, columns)) is not None and columns % RUN == 0
    )
    return (
        packed
        and aligned
        and biased
        and whole
        and fits_shared_memory(config_for(x.shape[0]), scale.shape[1])
    )


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; sums in float32."""
    return int4_gemm(x, weight, scale, offset, group, bias, gated=False)


def int4_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    *,
    gated: bool,
) -> torch.Tensor:
    """The output [T, N]; gated: silu(first half) · second half of it, [T, N / 2]."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    if wq_gemv.supports_weight(x, weight, scale, offset, group):
        return wq_gemv.wq_gemv(
            x, weight, (scale, offset, group), (None, None, bias), x.dtype, gated=gated
        )
    if tokens > MMA_MAX_ROWS:
        box, blocks = int4_gemm_small_m.padded_rows(tokens), launch.sm_count(x.get_device())
        spec = wq_gemm_pipelined.weight_spec(weight, scale, offset, group, columns)
        ring = (
            wq_gemm_pipelined.config_for(rows, spec, box, blocks)
            if wq_gemm_pipelined.supports_weight(rows, spec, gated=gated)
            else None
        )
        if ring is not None:
            return wq_gemm_pipelined.wq_gemm(
                x, weight, scale, offset, group, bias, ring, gated=gated
            )
        many = int4_gemm_small_m.config_for(rows, columns, group, box, blocks)
        if many is not None:
            return int4_gemm_small_m.int4_gemm(
                x, weight, scale, offset, group, bias, many, gated=gated
            )
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    form, piece = config_for(tokens), k_tile_for(group, columns)
    groups = scale.shape[1]
    with torch.cuda.device(x.device):
        macros = _kernel_macros(x.dtype, form, piece, offset=offset is not None, gated=gated)
        kernel = launch.load_kernel(
            "int4_linear", "int4_linear", macros, THREADS, form.shared_bytes(groups), x.get_device()
        )
        pointers = launch.data_pointers(x, weight, scale, offset, bias, out)
        counts = (
            tokens,
            rows,
            columns // RUN,
            x.stride(0),
            groups,
            group_shift(group, columns, piece),
        )
        kernel.launch(
            form.grid(rows, gated=gated), struct.pack("=6Q6i", *pointers, *counts), pdl=True
        )
    return out


def _kernel_macros(
    dtype: torch.dtype, config: WqMmaKernelConfig, k_tile: int, *, offset: bool, gated: bool
) -> tuple[str, ...]:
    if k_tile < K_TILE and config.m_tiles <= 2:  # as many bytes are on their way
        config = config._replace(prefetch_depth=2 * config.prefetch_depth)
    switches = (f"K_TILE={k_tile}", f"OFFSET={int(offset)}", f"GATED={int(gated)}", "SCALE_FP32=0")
    return (*config.macros, *switches, *TYPES[dtype])
