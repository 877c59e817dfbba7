"""Weight-only int4/int8 GEMM of many rows of x (wq_gemm_large_m.cu)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm import wq_gemm_tile
from modelmill.ops.cuda.weight_only_gemm.weight_only import DTYPE_DEFINES, PACK_COLUMNS, k_tile_for
from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from modelmill.ops.kernel_support import HALF_DTYPES, GemmProblem, GemmSupportRange, Kernel

K_TILE = 64
MIN_ROWS = 129  # fewer are wq_gemm_pipelined's
BLOCK_M = (128, 192, 256)  # rows of x of a block
_SMEM_ROW_BYTES = 16  # contiguous bytes in shared memory of a row of a K tile
_MIN_K_TILES_PER_SPLIT, _MIN_STAGES = 8, 3  # K tiles that a block of a cluster is worth
# measured on an H200: clocks of a K tile for each row of x of a block, and beside; of a tile beside
# its K tiles; of a launch
_CLOCKS_PER_K_TILE_ROW, _CLOCKS_PER_K_TILE, _CLOCKS_PER_TILE, _CLOCKS_PER_LAUNCH = (
    2.6,
    470,
    4500,
    3000,
)
_TWO_LAUNCH_EFFICIENCY = 0.97  # a second launch is worth so much less than a single one's clocks
_MAX_ROWS_BY_FORMAT = {
    (4, 128): 2048,
    (4, 64): 1024,
    (4, 32): 256,
    (8, 128): 1024,
    (8, 64): 1024,
    (8, 32): 256,
}
"""Most rows of x that are faster by the codes than with a dequantized weight, by bits and columns
of a group, 128 for larger ones (docs/notes/prompts-by-256-rows-of-x.md; 8 bits in groups of 32: as
4 bits)."""


class LargeMConfig(NamedTuple):
    """Rows of x of a block, and blocks of a cluster that share K."""

    block_m: int
    split_k: int


class PlannedLaunch(NamedTuple):
    """A launch over part of the weight."""

    config: LargeMConfig
    tiles: wq_gemm_tile.WeightTileRange


def plan_launches(problem: GemmProblem, *, gated: bool) -> tuple[PlannedLaunch, ...]:
    """The fastest launches of a product; none where the kernel does not serve it."""
    spec = wq_gemm_tile.problem_weight_spec(problem, K_TILE)
    if problem.device < 0 or not wq_gemm_tile.supports_weight(problem.n, spec, gated=gated):
        return ()
    # plans depend on blocks of 64 rows
    tokens = -(-problem.m // 64) * 64
    return fastest_plan(tokens, problem.n, spec, launch.sm_count(problem.device))


def fits(problem: GemmProblem, *, gated: bool) -> bool:
    """Whether the kernel serves such a weight."""
    return bool(plan_launches(problem, gated=gated))


def support_ranges(
    scale_dtypes: tuple[torch.dtype, ...] = (), *, gated: bool
) -> tuple[GemmSupportRange, ...]:
    """What the kernel serves, and is the fastest for, by the weight's format."""

    def fits_format(bits: int, columns: int, problem: GemmProblem) -> bool:
        spec = wq_gemm_tile.problem_weight_spec(problem)
        own_format = (spec.bits, k_tile_for(spec.group, spec.columns))
        return own_format == (bits, columns) and fits(problem, gated=gated)

    return tuple(
        GemmSupportRange(
            m=(MIN_ROWS, max_rows),
            k_multiple=PACK_COLUMNS,
            dtypes=HALF_DTYPES,
            scale_dtypes=scale_dtypes,
            fits=functools.partial(fits_format, *key),
        )
        for key, max_rows in _MAX_ROWS_BY_FORMAT.items()
    )


def list_kernels_by_preference(*, gated: bool) -> tuple[Kernel, ...]:
    """The kernel, with the fastest launches of a product."""
    run = functools.partial(groupwise_gemm, gated=gated)
    return tuple(Kernel(served, run) for served in support_ranges(gated=gated))


def groupwise_gemm(inputs: GroupwiseLinearInputs, *, gated: bool) -> torch.Tensor:
    """``wq_gemm`` with the plan for these operands."""
    return wq_gemm(inputs, plan_launches(make_groupwise_problem(*inputs), gated=gated), gated=gated)


def warmup_sizes(bits: int, max_rows: int) -> list[int]:
    """Rows of x with every number of blocks up to ``max_rows``: each may be another plan."""
    most = min(max_rows, max(rows for (own, _), rows in _MAX_ROWS_BY_FORMAT.items() if own == bits))
    return [min(rows, most) for rows in range(MIN_ROWS + 63, most + 64, 64)]


@functools.lru_cache(1024)  # called at each launch
def plan_block_smem(spec: wq_gemm_tile.WqSpec, config: LargeMConfig) -> wq_gemm_tile.BlockSmemPlan:
    """Shared memory of a block: the scales of two tiles, where there is room."""
    memory = wq_gemm_tile.BlockSmemPlan(spec, *config)
    double = memory._replace(scale_buffers=2)
    return double if config.split_k == 1 and double.num_stages > _MIN_STAGES else memory


def fits_shared_memory(spec: wq_gemm_tile.WqSpec, config: LargeMConfig) -> bool:
    """Whether a block's scales leave room for K tiles enough."""
    return plan_block_smem(spec, config).fits(
        _MIN_K_TILES_PER_SPLIT, _MIN_STAGES, holds_results=config.split_k > 1
    )


@functools.lru_cache(1024)  # called at each launch
def fastest_plan(
    tokens: int, rows: int, spec: wq_gemm_tile.WqSpec, num_sms: int
) -> tuple[PlannedLaunch, ...]:
    """The launches of the fewest expected clocks on ``num_sms`` SMs; none if no block fits.

    One launch, or one that fills all SMs as often as it can, and another for the rest of the
    weight, with other blocks.
    """
    configs = [
        LargeMConfig(block_m, split_k)
        for block_m in BLOCK_M
        for split_k in wq_gemm_tile.SPLIT_K_CHOICES
    ]
    fitting = [config for config in configs if fits_shared_memory(spec, config)]
    count = wq_gemm_tile.count_weight_tiles(rows)

    def clocks(planned: PlannedLaunch) -> float:
        block_m, split_k = planned.config
        blocks = planned.tiles.number * -(-tokens // block_m) * split_k
        # larger clusters do not fill every group of SMs
        waves = -(-blocks // (num_sms if split_k <= 2 else num_sms * 9 // 10))
        k_tile = _CLOCKS_PER_K_TILE + block_m * _CLOCKS_PER_K_TILE_ROW
        tile = -(-spec.k_tiles // split_k) * k_tile + _CLOCKS_PER_TILE
        return waves * tile + _CLOCKS_PER_LAUNCH

    def plans() -> Iterator[tuple[PlannedLaunch, ...]]:
        for config in fitting:
            yield (PlannedLaunch(config, wq_gemm_tile.WeightTileRange(0, count)),)
            m_tiles = -(-tokens // config.block_m)
            full = count * m_tiles // num_sms * num_sms // m_tiles  # weight tiles of full waves
            if config.split_k == 1 and 0 < full < count:
                whole = PlannedLaunch(config, wq_gemm_tile.WeightTileRange(0, full))
                for other in fitting:
                    yield (
                        whole,
                        PlannedLaunch(other, wq_gemm_tile.WeightTileRange(full, count - full)),
                    )

    def cost(plan: tuple[PlannedLaunch, ...]) -> float:
        return sum(map(clocks, plan)) / (_TWO_LAUNCH_EFFICIENCY if len(plan) > 1 else 1)

    return min(plans(), key=cost, default=())


def wq_gemm(
    inputs: GroupwiseLinearInputs, plan: tuple[PlannedLaunch, ...], *, gated: bool
) -> torch.Tensor:
    """X [T, K] · weightᵀ → [T, N]; gated: silu(first half) · second half of it, [T, N / 2]."""
    spec = wq_gemm_tile.problem_weight_spec(make_groupwise_problem(*inputs), K_TILE)
    out, num_sms = (
        wq_gemm_tile.empty_gemm_output(*inputs[:2], gated=gated),
        launch.sm_count(inputs.x.get_device()),
    )
    with torch.cuda.device(inputs.x.device):
        for config, tiles in plan:
            wq_gemm_tile.launch_gemm(
                "wq_gemm_large_m",
                plan_block_smem(spec, config),
                kernel_macros(inputs.x.dtype, spec, config, gated=gated),
                inputs,
                out,
                _SMEM_ROW_BYTES,
                tiles,
                num_sms if config.split_k == 1 else None,
                gated=gated,
            )
    return out


@functools.lru_cache(1024)
def kernel_macros(
    dtype: torch.dtype, spec: wq_gemm_tile.WqSpec, config: LargeMConfig, *, gated: bool
) -> tuple[str, ...]:
    """Macros of the kernel."""
    memory = plan_block_smem(spec, config)
    return (
        *memory.macros(gated=gated),
        f"SCALE_BUFFERS={memory.scale_buffers}",
        *DTYPE_DEFINES[dtype],
    )
