"""Products of up to 64 rows with 8-bit weights, a scale for each group or row, on tensor cores.

Of one row they are wq_gemv.cu's, of more or with large weights wq_gemm_pipelined.cu's; the rest
int8_gemm_small_m.cu serves.
"""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm import wq_gemm_pipelined, wq_gemv
from modelmill.ops.cuda.weight_only_gemm.int4_gemm_small_m import padded_rows
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
# rows, or weights: more of either go through shared memory (wq_gemm_pipelined), where the weight's
# sizes let them
MMA_MAX_ROWS, PIPELINED_MIN_WEIGHTS = 8, 1 << 25
_MAX_K_TILE = {8: 64}  # of a piece, by tiles of x: for more there are too few registers


def config_for(tokens: int) -> WqMmaKernelConfig:
    """How the kernel for so many rows of x is compiled."""
    return next(form for most, form in KERNEL_CONFIGS if tokens <= most)


def k_tile_for_rows(tokens: int, group: int, columns: int) -> int:
    """Columns that a warp takes at a time."""
    return min(k_tile_for(group, columns), _MAX_K_TILE.get(config_for(tokens).m_tiles, K_TILE))


def supports_weight(
    x: torch.Tensor,
    weight: torch.Tensor,
    grids: tuple[torch.Tensor, torch.Tensor | None, int],
    bias: torch.Tensor | None = None,
) -> bool:
    """Whether the kernels serve these operands.

    Up to 64 rows in 16 bits, K a multiple of 32, groups of 32, 64, 128, 256 … columns or of
    all; all packed.
    """
    if x.dim() != 2 or not 0 < x.shape[0] <= MAX_ROWS or x.dtype.itemsize != 2 or not x.is_cuda:
        return False
    scale, offset, group = grids
    packed = all(t is None or t.is_contiguous() for t in (weight, scale, offset, bias))
    aligned = (
        x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )
    alike = scale.dtype in (torch.float16, torch.float32) and (
        offset is None or offset.dtype == scale.dtype
    )
    columns = x.shape[1]
    runs = columns % RUN == 0 and (group % RUN == 0 or group >= columns)
    whole = runs and group_shift(group, columns, k_tile_for(group, columns)) is not None
    if not (packed and aligned and alike and whole) or (bias is not None and bias.dtype != x.dtype):
        return False
    return (
        fits_shared_memory(config_for(x.shape[0]), scale.numel() // weight.shape[0])
        or _pipelined_config(x, weight, grids) is not None
    )


def _pipelined_config(
    x: torch.Tensor,
    weight: torch.Tensor,
    grids: tuple[torch.Tensor, torch.Tensor | None, int],
    *,
    gated: bool = False,
) -> wq_gemm_pipelined.WqGemmKernelConfig | None:
    """How wq_gemm_pipelined is compiled for these, where it is what serves them."""
    tokens, columns = x.shape
    spec = wq_gemm_pipelined.weight_spec(weight, *grids, columns)
    if (
        tokens <= MMA_MAX_ROWS and weight.numel() < PIPELINED_MIN_WEIGHTS
    ) or not wq_gemm_pipelined.supports_weight(weight.shape[0], spec, gated=gated):
        return None
    return wq_gemm_pipelined.config_for(
        weight.shape[0], spec, padded_rows(tokens), launch.sm_count(x.get_device())
    )


def int8_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    grids: tuple[torch.Tensor, torch.Tensor | None, int],
    bias: torch.Tensor | None,
    *,
    gated: bool,
) -> torch.Tensor:
    """X [T, K] · weightᵀ → [T, N]; gated: silu(first half) · second half of it, [T, N / 2].

    grids: scale and offset [N, G], columns of a group.
    """
    scale, offset, group = grids
    tokens, columns = x.shape
    rows = weight.shape[0]
    groups = scale.numel() // rows
    if wq_gemv.supports_weight(x, weight, scale, offset, group):
        return wq_gemv.wq_gemv(x, weight, grids, (None, None, bias), x.dtype, gated=gated)
    ring = _pipelined_config(x, weight, grids, gated=gated)
    if ring is not None:
        return wq_gemm_pipelined.wq_gemm(x, weight, *grids, bias, ring, gated=gated)
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    few, piece = config_for(tokens), k_tile_for_rows(tokens, group, columns)
    with torch.cuda.device(x.device):
        wide = scale.dtype is torch.float32
        macros = kernel_macros(
            x.dtype, few, piece, offset=offset is not None, float32_scales=wide, gated=gated
        )
        kernel = launch.load_kernel(
            "int8_gemm_small_m",
            "int8_gemm_small_m",
            macros,
            THREADS,
            few.shared_bytes(groups),
            x.get_device(),
        )
        pointers = launch.data_pointers(x, weight, scale, offset, bias, out)
        counts = (tokens, rows, columns, x.stride(0), groups, group_shift(group, columns, piece))
        kernel.launch(
            few.grid(rows, gated=gated), struct.pack("=6Q6i", *pointers, *counts), pdl=True
        )
    return out


def kernel_macros(
    dtype: torch.dtype,
    config: WqMmaKernelConfig,
    k_tile: int,
    *,
    offset: bool,
    float32_scales: bool,
    gated: bool,
) -> tuple[str, ...]:
    """Macros of the kernel; smaller K tiles get a deeper prefetch, for as many bytes in flight."""
    config = config._replace(prefetch_depth=config.prefetch_depth * K_TILE // k_tile)
    switches = {"OFFSET": offset, "SCALE_FP32": float32_scales, "GATED": gated}
    return (
        *config.macros,
        f"K_TILE={k_tile}",
        *(f"{name}={int(on)}" for name, on in switches.items()),
        *TYPES[dtype],
    )
