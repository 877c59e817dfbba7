"""Products of up to 64 rows with 8-bit weights, a scale for each group or row, on tensor cores.

Of one row they are wq_gemv.cu's, of up to 16 wq_gemm_small_m.cu's, of more wq_gemm_pipelined.cu's;
the rest int8_gemm_small_m.cu serves. Up to 192 rows that wq_gemm_pipelined.cu does not serve are
multiplied 64 at a time.
"""

from __future__ import annotations

import functools
import struct

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm import (
    weight_only,
    wq_gemm_pipelined,
    wq_gemm_small_m,
    wq_gemv,
)
from modelmill.ops.cuda.weight_only_gemm.weight_only import K_TILE, WqMmaKernelConfig
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.kernel_support import GemmProblem, GemmSupportRange, Kernel

_MAX_K_TILE_BY_M_TILES = {8: 64}  # of a piece, by tiles of x: for more there are too few registers


def k_tile_for_rows(tokens: int, group: int, columns: int) -> int:
    """Columns that a warp takes at a time."""
    return min(
        weight_only.k_tile_for(group, columns),
        _MAX_K_TILE_BY_M_TILES.get(weight_only.config_for(tokens).m_tiles, K_TILE),
    )


def _fits_some_kernel(config: WqMmaKernelConfig, gated: bool, problem: GemmProblem) -> bool:
    """Whether groups divide a warp's pieces, and a block's scales find room in some kernel."""
    group, columns = problem.group or problem.k, problem.k
    whole = group % weight_only.PACK_COLUMNS == 0 or group >= columns
    if (
        not whole
        or weight_only.log2_k_tiles_per_group(
            group, columns, weight_only.k_tile_for(group, columns)
        )
        is None
    ):
        return False
    if weight_only.fits_shared_memory(config, problem.groups):
        return True
    large = (
        problem.m > wq_gemm_pipelined.MMA_MAX_ROWS
        or problem.n * columns >= wq_gemm_pipelined.MIN_WEIGHT_CODES
    )
    return large and wq_gemm_pipelined.problem_split_k(problem, gated=gated) is not None


def supported_problems(*, gated: bool) -> tuple[GemmSupportRange, ...]:
    """What the kernels serve: groups of 32, 64, 128, 256 … columns or of all.

    gated: with SwiGLU.
    """
    scales = (torch.float16, torch.float32)
    return wq_gemm_pipelined.supported_problems(_fits_some_kernel, scales, gated=gated)


SUPPORTED_PROBLEMS = supported_problems(gated=False)


def supports(inputs: GroupwiseLinearInputs) -> bool:
    """Whether all are packed and aligned, the offsets of the scales' dtype."""
    x, weight, scale, offset, _, bias = inputs
    packed = all(t is None or t.is_contiguous() for t in (weight, scale, offset))
    alike = offset is None or offset.dtype == scale.dtype
    return (
        packed
        and alike
        and x.is_cuda
        and weight_only.has_aligned_rows(x, weight)
        and weight_only.supports_bias(bias, x.dtype)
    )


def list_kernels_by_preference(*, gated: bool) -> tuple[Kernel, ...]:
    """The kernels of 8-bit weight-only GEMMs in order of preference; sums in float32."""
    few = (
        wq_gemv.make_gemv_kernel(gated=gated),
        *wq_gemm_small_m.list_kernels(gated=gated),
        *wq_gemm_pipelined.small_m_kernels(1, gated=gated),
        *weight_only.mma_kernels(functools.partial(int8_mma_gemm, gated=gated)),
    )
    large = wq_gemm_pipelined.large_m_kernels(gated=gated)
    return (*few, *large, weight_only.row_block_kernel(few))


def int8_mma_gemm(inputs: GroupwiseLinearInputs, *, gated: bool) -> torch.Tensor:
    """X [T, K] · weightᵀ → [T, N]; gated: silu(first half) · second half of it, [T, N / 2]."""
    x, weight, scale, offset, group, bias = inputs
    tokens, columns = x.shape
    rows = weight.shape[0]
    groups = scale.numel() // rows
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    few, piece = weight_only.config_for(tokens), k_tile_for_rows(tokens, group, columns)
    with torch.cuda.device(x.device):
        wide = scale.dtype is torch.float32
        macros = kernel_macros(
            x.dtype, few, piece, offset=offset is not None, float32_scales=wide, gated=gated
        )
        kernel = launch.compile_and_load_kernel(
            "int8_gemm_small_m",
            "int8_gemm_small_m",
            macros,
            weight_only.THREADS,
            few.shared_bytes(groups),
            x.get_device(),
        )
        pointers = launch.data_pointers(x, weight, scale, offset, bias, out)
        counts = (
            tokens,
            rows,
            columns,
            x.stride(0),
            groups,
            weight_only.log2_k_tiles_per_group(group, columns, piece),
        )
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
        *weight_only.DTYPE_DEFINES[dtype],
    )
