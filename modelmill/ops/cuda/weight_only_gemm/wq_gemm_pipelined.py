"""Weight-only int4/int8 GEMM of 2 rows and more through shared memory (wq_gemm_pipelined.cu)."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    K_TILE,
    KERNEL_CONFIGS,
    MAX_ROWS,
    RUN,
    TYPES,
    WqMmaKernelConfig,
    group_shift,
    k_tile_for,
    row_block_range,
    row_ranges_of_configs,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs, groupwise_problem
from modelmill.ops.kernel_range import HALF, GemmProblem, GemmRange, Kernel

# fewer rows only of weights of so many codes, or with small groups
MMA_MAX_ROWS, MIN_CODES = 8, 1 << 25
_MAX_SHARED_BYTES = 222 << 10  # bytes of a block at most
_MAX_STAGES = 8
_MIN_K_TILES_PER_SPLIT = 4  # K tiles that a block of a cluster is worth
_THREADS = 3 * 128  # two warpgroups that multiply, one that loads
_GROUPS_PER_MMA = 16  # groups whose sums are multiplied at once
_BLOCK_M = (16, 32, 64, 128)  # rows of x of a block
_MAX_LARGE_ROWS = {(4, 1): 1024, (8, 1): 768, (4, 2): 256, (8, 2): 128, (4, 4): 128, (8, 4): 128}
"""Most rows of x that were measured to be faster by the codes than with a dequantized weight, by
bits and groups of a K tile (docs/notes/prompts-by-the-codes.md)."""


class WqSpec(NamedTuple):
    """Format of a weight: bits, columns, group size, offsets and scale dtype."""

    bits: int
    columns: int
    group: int
    offset: bool
    float32_scales: bool = False

    @property
    def k_tiles(self) -> int:
        """Number of tiles of 128 columns along K."""
        return -(-self.columns // K_TILE)

    @property
    def group_shift(self) -> int | None:
        """K tiles that share a scale, as a power of two; None where that is none."""
        return group_shift(self.group, self.columns, K_TILE // self.groups_per_tile)

    @property
    def groups_per_tile(self) -> int:
        """Groups of a K tile: 1, 2 or 4."""
        return K_TILE // k_tile_for(self.group, self.columns)

    @property
    def part_bytes(self) -> int:
        """Contiguous bytes in shared memory of a row of a K tile."""
        parts = 2 if self.bits == 8 and self.groups_per_tile == 1 else self.groups_per_tile
        return K_TILE * self.bits // 8 // parts

    @property
    def needs_input_sums(self) -> bool:
        """Whether the offsets need group sums of x."""
        return self.bits == 4 or self.offset

    def groups_per_split(self, split_k: int) -> int:
        """Most groups that one of ``split_k`` blocks that share K touches."""
        each, by = -(-self.k_tiles // split_k), self.group_shift or 0
        if self.groups_per_tile > 1:
            return each * self.groups_per_tile
        ends = [(begin, min(begin + each, self.k_tiles)) for begin in range(0, self.k_tiles, each)]
        return max(((end - 1) >> by) - (begin >> by) + 1 for begin, end in ends)


SPLITS = (1, 2, 3, 4)  # blocks of a cluster that share K
BLOCK_N = 128  # weight rows of a block


def block_rows(tokens: int) -> int:
    """Rows of x of a block, padded: 16, 32, 64 or 128."""
    return next((rows for rows in _BLOCK_M if tokens <= rows), _BLOCK_M[-1])


def m_tiles(tokens: int) -> int:
    """Blocks along the rows of x."""
    return -(-tokens // block_rows(tokens))


def problem_spec(problem: GemmProblem) -> WqSpec:
    """The format of the weight of a product."""
    return WqSpec(
        4 if problem.weight_dtype is torch.uint8 else 8,
        problem.k,
        problem.group or problem.k,
        problem.offset,
        problem.scale_dtype is torch.float32,
    )


def problem_split(problem: GemmProblem, *, gated: bool) -> int | None:
    """Blocks that share K of a product; None where the kernel does not serve it."""
    spec = problem_spec(problem)
    if problem.device < 0 or not supports_weight(problem.n, spec, gated=gated):
        return None
    padded, tiles = block_rows(problem.m), m_tiles(problem.m)
    return split_for(problem.n, spec, padded, tiles, launch.sm_count(problem.device))


def supports_weight(rows: int, spec: WqSpec, *, gated: bool) -> bool:
    """Whether the kernel serves such a weight.

    The group size must be supported, outputs a multiple of 8, and scales float16 if group
    sums of x are needed.
    """
    return (
        spec.group_shift is not None
        and rows % (16 if gated else 8) == 0
        and not (spec.float32_scales and spec.needs_input_sums)
    )


def stage_bytes(spec: WqSpec, padded: int) -> int:
    """Bytes of a K tile: weights and columns of x."""
    return BLOCK_N * K_TILE * spec.bits // 8 + padded * 256


def _scale_bytes(split_k: int, spec: WqSpec) -> int:
    return (
        BLOCK_N
        * (spec.groups_per_split(split_k) | 1)
        * (4 if spec.offset or spec.float32_scales else 2)
    )


def num_stages(split_k: int, spec: WqSpec, padded: int) -> int:
    """K tiles on their way beside the scales of a block's groups."""
    left = _MAX_SHARED_BYTES - _scale_bytes(split_k, spec)
    return min(_MAX_STAGES, left // (stage_bytes(spec, padded) + 16))


def shared_bytes(split_k: int, spec: WqSpec, padded: int) -> int:
    """Bytes of a block's shared memory."""
    return num_stages(split_k, spec, padded) * (stage_bytes(spec, padded) + 16) + _scale_bytes(
        split_k, spec
    )


def fits_shared_memory(split_k: int, spec: WqSpec, padded: int) -> bool:
    """Whether a block's scales leave room for K tiles enough, and for the sums where they were."""
    if spec.group_shift is None or (
        split_k > 1 and spec.k_tiles < _MIN_K_TILES_PER_SPLIT * split_k
    ):
        return False
    stages = num_stages(split_k, spec, padded)
    return stages >= 3 and stages * stage_bytes(spec, padded) >= padded * (BLOCK_N + 4) * 4


@functools.lru_cache(1024)  # called at each launch
def split_for(rows: int, spec: WqSpec, padded: int, num_blocks: int, num_sms: int) -> int | None:
    """The split of K with the best occupancy of ``num_sms`` SMs, or None.

    rows: of the weight. padded, num_blocks: rows of x of a block, blocks along them.
    """
    tiles = -(-rows // BLOCK_N) * num_blocks

    def cost(split_k: int) -> tuple[float, int]:
        # larger clusters do not fill every group of SMs
        places = num_sms if split_k <= 2 else num_sms * 9 // 10
        waves = -(-tiles * split_k // places)
        return waves / split_k, waves

    fitting = [split_k for split_k in SPLITS if fits_shared_memory(split_k, spec, padded)]
    return min(fitting, key=cost, default=None)


def groupwise_gemm(inputs: GroupwiseLinearInputs, *, gated: bool) -> torch.Tensor:
    """``wq_gemm`` with the split for these operands."""
    split_k = problem_split(groupwise_problem(*inputs), gated=gated)
    assert split_k is not None, "see fits"
    return wq_gemm(inputs, split_k, gated=gated)


def _fits(problem: GemmProblem, *, gated: bool) -> bool:
    return problem_split(problem, gated=gated) is not None


def _fits_format(
    problem: GemmProblem, *, gated: bool, formats: Collection[tuple[int, int]]
) -> bool:
    """formats: bits and groups of a K tile."""
    spec = problem_spec(problem)
    return (spec.bits, spec.groups_per_tile) in formats and _fits(problem, gated=gated)


def supported_problems(
    few_rows_fit: Callable[[WqMmaKernelConfig, bool, GemmProblem], bool],
    scale_dtypes: tuple[torch.dtype, ...],
    *,
    gated: bool,
) -> tuple[GemmRange, ...]:
    """What an implementation serves that has this kernel beside one with mma.sync.

    few_rows_fit: whether some kernel serves a weight with up to ``MAX_ROWS`` rows of x; its
        arguments are the mma.sync kernel's config, ``gated`` and the product.
    """
    few = [
        GemmRange(
            m=rows,
            k_multiple=RUN,
            dtypes=HALF,
            scale_dtypes=scale_dtypes,
            fits=functools.partial(few_rows_fit, config, gated),
        )
        for rows, config in row_ranges_of_configs(KERNEL_CONFIGS)
    ]
    large = _large_m_ranges(gated=gated, scale_dtypes=scale_dtypes)
    return (*few, row_block_range(few, functools.partial(problem_split, gated=gated)), *large)


def _large_m_ranges(*, gated: bool, scale_dtypes: tuple[torch.dtype, ...]) -> tuple[GemmRange, ...]:
    return tuple(
        GemmRange(
            m=(MAX_ROWS + 1, rows),
            k_multiple=RUN,
            dtypes=HALF,
            scale_dtypes=scale_dtypes,
            fits=functools.partial(_fits_format, gated=gated, formats=(key,)),
        )
        for key, rows in _MAX_LARGE_ROWS.items()
    )


def specializations(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """Rows of x with each number of blocks up to ``max_rows``: each may be another kernel."""
    if x.dtype not in HALF:
        return []
    bits = 4 if weight.dtype is torch.uint8 else 8
    most = max(rows for (own, _), rows in _MAX_LARGE_ROWS.items() if own == bits)
    counts = (*_BLOCK_M, *range(2 * _BLOCK_M[-1], most + 1, _BLOCK_M[-1]))
    least = (1, *(rows + 1 for rows in counts))
    return [min(rows, max_rows) for first, rows in zip(least, counts) if first <= max_rows]


def few_row_kernels(min_rows: int, *, gated: bool) -> tuple[Kernel, ...]:
    """The kernel as one of the weight-only GEMMs' of up to ``MAX_ROWS`` rows.

    min_rows: of large weights.
    """
    fits = functools.partial(_fits, gated=gated)
    small_groups = [(bits, groups) for bits, groups in _MAX_LARGE_ROWS if groups > 1]
    ranges = (
        GemmRange(m=(min_rows, MMA_MAX_ROWS), min_weight_bytes=MIN_CODES, fits=fits),
        GemmRange(
            m=(2, MMA_MAX_ROWS),
            fits=functools.partial(_fits_format, gated=gated, formats=small_groups),
        ),
        # one block size each
        *(GemmRange(m=m, fits=fits) for m in ((MMA_MAX_ROWS + 1, 16), (17, 32), (33, MAX_ROWS))),
    )
    run = functools.partial(groupwise_gemm, gated=gated)
    return tuple(Kernel(served, run) for served in ranges)


def large_m_kernels(*, gated: bool) -> tuple[Kernel, ...]:
    """The kernel for more rows."""
    run = functools.partial(groupwise_gemm, gated=gated)
    return tuple(Kernel(served, run) for served in _large_m_ranges(gated=gated, scale_dtypes=()))


def wq_gemm(inputs: GroupwiseLinearInputs, split_k: int, *, gated: bool) -> torch.Tensor:
    """X [T, K] · weightᵀ → [T, N]; gated: silu(first half) · second half of it, [T, N / 2]."""
    x, weight, scale, offset, _, bias = inputs
    tokens, columns = x.shape
    rows, spec = weight.shape[0], problem_spec(groupwise_problem(*inputs))
    groups, k_tiles, padded = scale.numel() // rows, spec.k_tiles, block_rows(tokens)
    assert spec.group_shift is not None
    shift = spec.group_shift if spec.groups_per_tile == 1 else 0
    chunks = -(-groups // _GROUPS_PER_MMA) if spec.needs_input_sums else 0
    # warps per row of x: one per group whose sum is needed, or per K tile
    units = (
        max(k_tiles, chunks * _GROUPS_PER_MMA // spec.groups_per_tile)
        if spec.groups_per_tile > 1 or not spec.needs_input_sums
        else chunks * _GROUPS_PER_MMA
    )
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    pitch = k_tiles * K_TILE + chunks * 64
    permuted = torch.empty((tokens, pitch), dtype=x.dtype, device=x.device)
    device = x.get_device()
    with torch.cuda.device(x.device):
        macros = kernel_macros(x.dtype, split_k, spec, padded, gated=gated)
        permute = launch.load_kernel(
            "wq_gemm_pipelined", "wq_permute_and_sum", macros, 256, 0, device
        )
        counts = (tokens, columns, x.stride(0), pitch, k_tiles, groups, shift, units)
        work = struct.pack("=2Q8i", x.data_ptr(), permuted.data_ptr(), *counts)
        permute.launch(-(-tokens * units // 8), work, pdl=True)
        size = shared_bytes(split_k, spec, padded)
        kernel = launch.load_kernel(
            "wq_gemm_pipelined", "wq_gemm_pipelined", macros, _THREADS, size, device
        )
        x_map = launch.tensor_map(
            permuted.data_ptr(), x.dtype, (pitch, tokens), (pitch * 2,), (64, padded)
        )
        row_bytes, box = weight.shape[1], (spec.part_bytes, BLOCK_N // 2 if gated else BLOCK_N)
        w_map = launch.tensor_map(
            weight.data_ptr(), weight.dtype, (row_bytes, rows), (row_bytes,), box, False
        )
        sizes = (tokens, rows, k_tiles, groups, shift, spec.groups_per_split(split_k) | 1)
        pointers = launch.data_pointers(scale, offset, bias, out)
        work = struct.pack("=4Q7i4x", *pointers, *sizes, m_tiles(tokens))
        clusters = -(-rows // BLOCK_N) * m_tiles(tokens)
        kernel.launch(clusters * split_k, x_map, w_map, work, pdl=True)
    return out


@functools.lru_cache(1024)
def kernel_macros(
    dtype: torch.dtype, split_k: int, spec: WqSpec, padded: int, *, gated: bool
) -> tuple[str, ...]:
    """Macros of the kernel."""
    sizes = {
        "BITS": spec.bits,
        "GROUPS": spec.groups_per_tile,
        "BLOCK_M": padded,
        "SPLIT": split_k,
        "STAGES": num_stages(split_k, spec, padded),
        "GATED": gated,
        "OFFSET": spec.offset,
        "SCALE_FP32": spec.float32_scales,
    }
    return (*(f"{name}={int(size)}" for name, size in sizes.items()), *TYPES[dtype])
