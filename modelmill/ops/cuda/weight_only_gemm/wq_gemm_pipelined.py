"""Weight-only int4/int8 GEMM of 2 to 128 rows through shared memory (wq_gemm_pipelined.cu)."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm import wq_gemm_large_m, wq_gemm_small_m
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    DTYPE_DEFINES,
    K_TILE,
    KERNEL_CONFIGS,
    MAX_ROWS,
    PACK_COLUMNS,
    WqMmaKernelConfig,
    config_row_ranges,
    row_block_support_range,
)
from modelmill.ops.cuda.weight_only_gemm.wq_gemm_tile import (
    SPLIT_K_CHOICES,
    BlockSmemPlan,
    WeightTileRange,
    WqSpec,
    count_weight_tiles,
    empty_gemm_output,
    launch_gemm,
    problem_weight_spec,
    supports_weight,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from modelmill.ops.kernel_support import HALF_DTYPES, GemmProblem, GemmSupportRange, Kernel

# fewer rows only of weights of so many codes, or with small groups
MMA_MAX_ROWS, MIN_WEIGHT_CODES = 8, 1 << 25
_MIN_K_TILES_PER_SPLIT, _MIN_STAGES = 4, 3  # K tiles that a block of a cluster is worth
_GROUPS_PER_MMA = 16  # groups whose sums are multiplied at once
_BLOCK_M = (16, 32, 64, 128)  # rows of x of a block
MAX_BLOCK_ROWS = _BLOCK_M[-1]


def block_rows(tokens: int) -> int:
    """Rows of x of a block, padded: 16, 32, 64 or 128."""
    return next((rows for rows in _BLOCK_M if tokens <= rows), _BLOCK_M[-1])


def problem_split_k(problem: GemmProblem, *, gated: bool) -> int | None:
    """Blocks that share K of a product; None where the kernel does not serve it."""
    spec = problem_weight_spec(problem)
    if problem.device < 0 or not supports_weight(problem.n, spec, gated=gated):
        return None
    return best_split_k(problem.n, spec, block_rows(problem.m), launch.sm_count(problem.device))


def smem_row_bytes(spec: WqSpec) -> int:
    """Contiguous bytes in shared memory of a row of a K tile."""
    parts = 2 if spec.bits == 8 and spec.groups_per_tile == 1 else spec.groups_per_tile
    return K_TILE * spec.bits // 8 // parts


def fits_shared_memory(split_k: int, spec: WqSpec, padded: int) -> bool:
    """Whether a block's scales leave room for K tiles enough."""
    return BlockSmemPlan(spec, padded, split_k).fits(_MIN_K_TILES_PER_SPLIT, _MIN_STAGES)


@functools.lru_cache(1024)  # called at each launch
def best_split_k(rows: int, spec: WqSpec, padded: int, num_sms: int) -> int | None:
    """The split of K with the best occupancy of ``num_sms`` SMs, or None.

    rows: of the weight. padded: rows of x of a block.
    """
    tiles = count_weight_tiles(rows)

    def cost(split_k: int) -> tuple[float, int]:
        # larger clusters do not fill every group of SMs
        places = num_sms if split_k <= 2 else num_sms * 9 // 10
        waves = -(-tiles * split_k // places)
        return waves / split_k, waves

    fitting = [split_k for split_k in SPLIT_K_CHOICES if fits_shared_memory(split_k, spec, padded)]
    return min(fitting, key=cost, default=None)


def groupwise_gemm(inputs: GroupwiseLinearInputs, *, gated: bool) -> torch.Tensor:
    """``wq_gemm`` with the split for these operands."""
    split_k = problem_split_k(make_groupwise_problem(*inputs), gated=gated)
    assert split_k is not None, "see fits"
    return wq_gemm(inputs, split_k, gated=gated)


def _fits(problem: GemmProblem, *, gated: bool) -> bool:
    return problem_split_k(problem, gated=gated) is not None


def _fits_small_groups(problem: GemmProblem, *, gated: bool) -> bool:
    return problem_weight_spec(problem).groups_per_tile > 1 and _fits(problem, gated=gated)


def supported_problems(
    few_rows_fit: Callable[[WqMmaKernelConfig, bool, GemmProblem], bool],
    scale_dtypes: tuple[torch.dtype, ...],
    *,
    gated: bool,
) -> tuple[GemmSupportRange, ...]:
    """What an implementation serves that has this kernel beside one with mma.sync.

    few_rows_fit: whether some kernel serves a weight with up to ``MAX_ROWS`` rows of x; its
        arguments are the mma.sync kernel's config, ``gated`` and the product.
    """
    few = [
        GemmSupportRange(
            m=rows,
            k_multiple=PACK_COLUMNS,
            dtypes=HALF_DTYPES,
            scale_dtypes=scale_dtypes,
            fits=functools.partial(few_rows_fit, config, gated),
        )
        for rows, config in config_row_ranges(KERNEL_CONFIGS)
    ]
    blocks = row_block_support_range(few, functools.partial(_serves_above_max_rows, gated=gated))
    own = GemmSupportRange(
        m=(MAX_ROWS + 1, MAX_BLOCK_ROWS),
        k_multiple=PACK_COLUMNS,
        dtypes=HALF_DTYPES,
        scale_dtypes=scale_dtypes,
        fits=functools.partial(_fits, gated=gated),
    )
    return (*few, blocks, own, *wq_gemm_large_m.support_ranges(scale_dtypes, gated=gated))


def _serves_above_max_rows(problem: GemmProblem, *, gated: bool) -> bool:
    """Whether more rows of x than ``MAX_ROWS`` are multiplied at once."""
    return _fits(problem, gated=gated) and wq_gemm_large_m.fits(problem, gated=gated)


def warmup_sizes(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """Rows of x with each number of blocks up to ``max_rows``: each may be another kernel."""
    if x.dtype not in HALF_DTYPES:
        return []
    most = (wq_gemm_small_m.ROWS_PER_M_TILE, *_BLOCK_M)
    least = (1, *(rows + 1 for rows in most[:-1]))
    few = [min(rows, max_rows) for first, rows in zip(least, most) if first <= max_rows]
    bits = 4 if weight.dtype is torch.uint8 else 8
    return few + wq_gemm_large_m.warmup_sizes(bits, max_rows)


def small_m_kernels(min_rows: int, *, gated: bool) -> tuple[Kernel, ...]:
    """The kernel as one of the weight-only GEMMs' of up to ``MAX_ROWS`` rows.

    min_rows: of large weights.
    """
    fits = functools.partial(_fits, gated=gated)
    ranges = (
        GemmSupportRange(m=(min_rows, MMA_MAX_ROWS), min_weight_bytes=MIN_WEIGHT_CODES, fits=fits),
        GemmSupportRange(
            m=(2, MMA_MAX_ROWS),
            fits=functools.partial(_fits_small_groups, gated=gated),
        ),
        # one block size each
        *(
            GemmSupportRange(m=m, fits=fits)
            for m in ((MMA_MAX_ROWS + 1, 16), (17, 32), (33, MAX_ROWS))
        ),
    )
    run = functools.partial(groupwise_gemm, gated=gated)
    return tuple(Kernel(served, run) for served in ranges)


def large_m_kernels(*, gated: bool) -> tuple[Kernel, ...]:
    """The kernels for more rows: of 128, and of any number."""
    own = GemmSupportRange(
        m=(MAX_ROWS + 1, MAX_BLOCK_ROWS), fits=functools.partial(_fits, gated=gated)
    )
    run = functools.partial(groupwise_gemm, gated=gated)
    return Kernel(own, run), *wq_gemm_large_m.list_kernels_by_preference(gated=gated)


def wq_gemm(inputs: GroupwiseLinearInputs, split_k: int, *, gated: bool) -> torch.Tensor:
    """X [T, K] · weightᵀ → [T, N]; gated: silu(first half) · second half of it, [T, N / 2]."""
    x, weight, scale, *_ = inputs
    tokens, columns = x.shape
    spec = problem_weight_spec(make_groupwise_problem(*inputs))
    groups, k_tiles, padded = scale.numel() // len(weight), spec.k_tiles, block_rows(tokens)
    assert spec.log2_k_tiles_per_group is not None
    shift = spec.log2_k_tiles_per_group if spec.groups_per_tile == 1 else 0
    chunks = -(-groups // _GROUPS_PER_MMA) if spec.needs_input_sums else 0
    # warps per row of x: one per group whose sum is needed, or per K tile
    units = (
        max(k_tiles, chunks * _GROUPS_PER_MMA // spec.groups_per_tile)
        if spec.groups_per_tile > 1 or not spec.needs_input_sums
        else chunks * _GROUPS_PER_MMA
    )
    pitch = k_tiles * K_TILE + chunks * 64
    permuted = torch.empty((tokens, pitch), dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        memory = BlockSmemPlan(spec, padded, split_k)
        macros = kernel_macros(x.dtype, split_k, spec, padded, gated=gated)
        permute = launch.compile_and_load_kernel(
            "wq_gemm_pipelined", "wq_permute_and_sum", macros, 256, 0, x.get_device()
        )
        counts = (tokens, columns, x.stride(0), pitch, k_tiles, groups, shift, units)
        work = struct.pack("=2Q8i", x.data_ptr(), permuted.data_ptr(), *counts)
        permute.launch(-(-tokens * units // 8), work, pdl=True)
        out = empty_gemm_output(x, weight, gated=gated)
        launch_gemm(
            "wq_gemm_pipelined",
            memory,
            macros,
            inputs._replace(x=permuted),
            out,
            smem_row_bytes(spec),
            WeightTileRange(0, count_weight_tiles(len(weight))),
            gated=gated,
        )
    return out


@functools.lru_cache(1024)
def kernel_macros(
    dtype: torch.dtype, split_k: int, spec: WqSpec, padded: int, *, gated: bool
) -> tuple[str, ...]:
    """Macros of the kernel."""
    return (*BlockSmemPlan(spec, padded, split_k).macros(gated=gated), *DTYPE_DEFINES[dtype])
