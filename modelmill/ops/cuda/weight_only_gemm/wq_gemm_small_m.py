"""Weight-only int4/int8 GEMM of 2 to 16 rows with x in registers (wq_gemm_small_m.cu)."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm import wq_gemv
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    DTYPE_DEFINES,
    k_tile_for,
    log2_k_tiles_per_group,
)
from modelmill.ops.cuda.weight_only_gemm.wq_gemv import LINE_BYTES, LINE_TILE_BYTES, ROWS_PER_TILE
from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from modelmill.ops.kernel_support import GemmProblem, GemmSupportRange, Kernel

# Sizes of wq_gemm_small_m.cu.
ROWS_PER_M_TILE = 8
_PARTIAL_SUM_TILE_BYTES = 4 * ROWS_PER_M_TILE * (ROWS_PER_TILE + 4)
MAX_ROWS = 16
_MAX_MMA_WARPS, _PRODUCER_AND_REDUCE_WARPS = 16, 3  # that multiply; one loads, two add
_MAX_X_REGISTERS = 64  # of a thread
_SPLIT_K_CHOICES, _MAX_X_BYTES = (
    (1, 2, 4),
    64 << 10,
)  # blocks of a cluster; of x that a block should read
_MAX_STAGES, _MAX_PIPELINE_BYTES = 8, 64 << 10  # of weights in flight
_MIN_WEIGHT_CODES = 1 << 22  # of a weight, for up to eight rows of x
_SCALE_TILE_SLOTS = 4  # tiles whose scales and sums a block holds
# Two blocks of a kernel on one SM would leave another without work.
_MIN_SHARED_BYTES, _MAX_SHARED_BYTES = 116 << 10, 222 << 10


class SmallMSpec(NamedTuple):
    """Operand formats: weight bits, columns of a part, tiles of x, offsets, scale dtype."""

    bits: int
    part_columns: int
    m_tiles: int
    offset: bool
    float32_scales: bool

    @property
    def max_lines_per_warp(self) -> int:
        """Lines whose columns of x find room in registers."""
        return _MAX_X_REGISTERS * self.bits // (128 * self.m_tiles)


class SmallMConfig(NamedTuple):
    """Kernel config: the weight's lines, groups and tiles, clusters, passes, and macros."""

    lines: int
    groups: int
    tiles: int
    clusters: int
    split_k: int
    passes: int
    lines_per_warp: int
    warps: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + _PRODUCER_AND_REDUCE_WARPS)

    @property
    def max_tiles_per_cluster(self) -> int:
        """Tiles of a cluster at most."""
        return -(-self.tiles // self.clusters)


def problem_spec(problem: GemmProblem) -> SmallMSpec:
    """What the kernel is compiled for."""
    bits = 4 if problem.weight_dtype is torch.uint8 else 8
    columns = k_tile_for(problem.group or problem.k, problem.k, 128 if bits == 4 else 64)
    return SmallMSpec(
        bits,
        columns,
        -(-problem.m // ROWS_PER_M_TILE),
        problem.offset,
        problem.scale_dtype is torch.float32,
    )


@functools.lru_cache(1024)  # called at each launch
def config_for(
    spec: SmallMSpec, columns: int, groups: int, tiles: int, num_sms: int
) -> SmallMConfig | None:
    """The config with the fewest passes; None if it does not fit in shared memory.

    tiles: of the weight.
    """
    lines = -(-columns * spec.bits // (8 * LINE_BYTES))
    x_bytes = 2 * ROWS_PER_M_TILE * spec.m_tiles * columns
    split_k = next(
        (n for n in _SPLIT_K_CHOICES if x_bytes <= n * _MAX_X_BYTES), _SPLIT_K_CHOICES[-1]
    )
    block_lines = -(-lines // split_k)
    most = _MAX_MMA_WARPS // spec.m_tiles  # more have too few registers
    passes = -(-block_lines // (most * spec.max_lines_per_warp))
    pass_lines = -(-block_lines // passes)
    each = -(-pass_lines // most)
    warps = -(-pass_lines // each)
    clusters = num_clusters(split_k, tiles, num_sms)
    most_stages = max(min(_MAX_PIPELINE_BYTES // (warps * LINE_TILE_BYTES), _MAX_STAGES), 2)
    sizes = (lines, groups, tiles, clusters, split_k, passes, each, warps)
    configs = (SmallMConfig(*sizes, stages) for stages in range(most_stages, 1, -1))
    fitting = (config for config in configs if shared_bytes(spec, config) <= _MAX_SHARED_BYTES)
    return next(fitting, None)


def shared_bytes(spec: SmallMSpec, config: SmallMConfig) -> int:
    """Bytes of a block's shared memory."""
    sum_bytes, split_k, most = (
        spec.m_tiles * _PARTIAL_SUM_TILE_BYTES,
        config.split_k,
        config.max_tiles_per_cluster,
    )
    own = -(-most // split_k)
    used = config.warps * (config.stages * LINE_TILE_BYTES + _SCALE_TILE_SLOTS * sum_bytes)
    used += 16 * (config.stages + _SCALE_TILE_SLOTS)
    scales = ROWS_PER_TILE * config.groups * (4 if spec.float32_scales else 2)
    used += _SCALE_TILE_SLOTS * (2 if spec.offset else 1) * scales
    used += most * sum_bytes if config.passes > 1 else 0
    used += own * ((split_k - 1) * sum_bytes + 8) if split_k > 1 else 0
    return max(used, _MIN_SHARED_BYTES)


def num_clusters(split_k: int, tiles: int, num_sms: int) -> int:
    """Clusters of a launch: as many as find room at once, or one per tile."""
    # larger clusters do not fill every group of SMs
    places = num_sms if split_k <= 2 else num_sms * 9 // 10
    return min(tiles, max(places // split_k, 1))


def problem_config(problem: GemmProblem) -> SmallMConfig | None:
    """The config for a product; None where the kernel does not serve it."""
    spec = problem_spec(problem)
    if (
        problem.device < 0
        or not 2 <= problem.m <= MAX_ROWS
        or problem.n % ROWS_PER_TILE
        or problem.k * spec.bits % (8 * LINE_BYTES)
        or log2_k_tiles_per_group(problem.group or problem.k, problem.k, spec.part_columns) is None
        or (spec.float32_scales and (spec.bits == 4 or spec.offset))
    ):
        return None
    return config_for(
        spec,
        problem.k,
        problem.groups,
        problem.n // ROWS_PER_TILE,
        launch.sm_count(problem.device),
    )


def _fits(problem: GemmProblem) -> bool:
    return problem_config(problem) is not None


def _fits_one_pass(problem: GemmProblem) -> bool:
    config = problem_config(problem)
    return config is not None and config.passes == 1


def list_kernels(*, gated: bool) -> tuple[Kernel, ...]:
    """The kernel as one of the weight-only GEMMs', for each number of tiles of x."""
    run = functools.partial(groupwise_gemm, gated=gated)
    ranges = (
        GemmSupportRange(m=(2, ROWS_PER_M_TILE), fits=_fits, min_weight_bytes=_MIN_WEIGHT_CODES),
        GemmSupportRange(m=(ROWS_PER_M_TILE + 1, MAX_ROWS), fits=_fits_one_pass),
    )
    return tuple(Kernel(served, run, wq_gemv.supports_groupwise) for served in ranges)


def groupwise_gemm(inputs: GroupwiseLinearInputs, *, gated: bool) -> torch.Tensor:
    """``wq_gemm`` with the config for these operands."""
    problem = make_groupwise_problem(*inputs)
    config = problem_config(problem)
    assert config is not None, "see problem_config"
    return wq_gemm(inputs, config, gated=gated)


def wq_gemm(inputs: GroupwiseLinearInputs, config: SmallMConfig, *, gated: bool) -> torch.Tensor:
    """X [M, K] · weightᵀ → [M, N]; gated: silu(first half) · second half of it, [M, N / 2]."""
    x, weight, scale, offset, group, bias = inputs
    problem = make_groupwise_problem(*inputs)
    spec = problem_spec(problem)
    shift = log2_k_tiles_per_group(group or problem.k, problem.k, spec.part_columns)
    assert shift is not None, "see problem_config"
    size = (problem.m, problem.n // 2 if gated else problem.n)
    out = torch.empty(size, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        kernel = launch.compile_and_load_kernel(
            "wq_gemm_small_m",
            "wq_gemm_small_m",
            kernel_macros(x.dtype, spec, config, shift, gated=gated),
            config.threads,
            shared_bytes(spec, config),
            x.get_device(),
        )
        row_sizes, row_strides, row_box = wq_gemv.weight_tensor_map_geometry(
            problem.n, weight.stride(0), gated=gated
        )
        there = launch.tensor_map(
            weight.data_ptr(),
            torch.int32,
            (LINE_BYTES // 4, *row_sizes, config.lines),
            (*row_strides, LINE_BYTES),
            (LINE_BYTES // 4, *row_box, config.warps),
        )
        pointers = launch.data_pointers(x, scale, offset, bias, out)
        counts = (problem.m, x.stride(0), problem.n, problem.k, problem.groups, shift)
        sizes = (config.tiles, config.lines, config.passes, config.max_tiles_per_cluster)
        work = struct.pack("=5Q10i", *pointers, *counts, *sizes)
        kernel.launch(config.clusters * config.split_k, there, work, pdl=True)
    return out


@functools.lru_cache(1024)
def kernel_macros(
    dtype: torch.dtype, spec: SmallMSpec, config: SmallMConfig, shift: int, *, gated: bool
) -> tuple[str, ...]:
    """Macros of the kernel; shift: log2 of the parts that share a scale."""
    parts = 8 * LINE_BYTES // (spec.bits * spec.part_columns)
    together = parts > 1 and shift == 0 and config.groups % parts == 0
    sizes = {
        "BITS": spec.bits,
        "PART_COLUMNS": spec.part_columns,
        "M_TILES": spec.m_tiles,
        "LINES": config.lines_per_warp,
        "WARPS": config.warps,
        "SPLIT": config.split_k,
        "STAGES": config.stages,
        "GATED": gated,
        "OFFSET": spec.offset,
        "SCALE_FP32": spec.float32_scales,
        "VECTOR_SCALES": together and not spec.float32_scales,
    }
    return (*(f"{name}={int(size)}" for name, size in sizes.items()), *DTYPE_DEFINES[dtype])
