"""Weight-only GEMV of one row by TMA and 8-bit tensor cores (wq_gemv.cu)."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    DTYPE_DEFINES,
    K_TILE,
    log2_k_tiles_per_group,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.kernel_support import GemmProblem, GemmSupportRange, Kernel, make_gemm_problem

# Sizes of wq_gemv.cu.
ROWS_PER_TILE, LINE_BYTES = 16, 128
LINE_TILE_BYTES = ROWS_PER_TILE * LINE_BYTES
_TILES_IN_FLIGHT_CHOICES = (4, 2, 1)  # tiles whose scales and sums a block holds
# Bytes of a block: at least more than half of what there is, since two blocks of a kernel on one
# SM would leave another without work. Little more where that suffices: what is left
# lets the small kernels between products in.
_MIN_SHARED_BYTES, _TARGET_SHARED_BYTES, _MAX_SHARED_BYTES = 116 << 10, 124 << 10, 224 << 10


class WqGemvSpec(NamedTuple):
    """Operand formats: weight bits, int8 or 16-bit x, offsets, scale dtype, groups per K tile."""

    bits: int
    int8_input: bool
    offset: bool
    float32_scales: bool
    groups_per_tile: int = 1  # of a piece of 128 columns

    @property
    def max_warps_and_stages(self) -> tuple[int, int]:
        """Most warps per block and lines in flight per warp, measured on an H200 with 7B shapes."""
        return (22, 2) if self.int8_input else (16, 3)


class WqGemvKernelConfig(NamedTuple):
    """Kernel config: lines of 128 bytes and groups per row, warps, stages, scale stages."""

    lines: int
    groups: int
    warps: int
    stages: int
    tiles_in_flight: int


def config_for(spec: WqGemvSpec, columns: int, groups: int) -> WqGemvKernelConfig | None:
    """The config with as many stages as fit in shared memory; None if two do not fit."""
    lines, (warps, most) = -(-columns * spec.bits // 8 // 128), spec.max_warps_and_stages
    for scale_stages in _TILES_IN_FLIGHT_CHOICES:
        every = [
            WqGemvKernelConfig(lines, groups, min(warps, lines), stages, scale_stages)
            for stages in range(most, 1, -1)
        ]
        best = next(
            (shape for shape in every if shared_bytes(spec, shape) <= _TARGET_SHARED_BYTES),
            every[-1],
        )
        if shared_bytes(spec, best) <= _MAX_SHARED_BYTES:
            return best
    return None


def shared_bytes(spec: WqGemvSpec, config: WqGemvKernelConfig) -> int:
    """Bytes of a block's shared memory."""
    pieces = config.lines * 8 // spec.bits
    planes = (8 // spec.bits) if spec.int8_input else 4
    sums = pieces * spec.groups_per_tile if spec.bits == 4 or spec.offset else 0
    barriers = (
        8 * (config.warps * config.stages + config.tiles_in_flight) + 4 * config.tiles_in_flight
    )
    used = (
        config.warps * config.stages * LINE_TILE_BYTES
        + _round_up_16(barriers)
        + 4 * config.tiles_in_flight * config.warps * ROWS_PER_TILE
    )
    used += pieces * planes * K_TILE + 4 * (2 * pieces + sums)
    grids = (
        config.tiles_in_flight
        * (2 if spec.offset else 1)
        * ROWS_PER_TILE
        * config.groups
        * (4 if spec.float32_scales else 2)
    )
    return max(_MIN_SHARED_BYTES, _round_up_16(used) + grids)


def _round_up_16(size: int) -> int:
    return -(-size // 16) * 16


def supports_problem(problem: GemmProblem) -> bool:
    """Whether the kernel serves such a weight.

    Rows of the weight in multiples of 16, K of 32; groups that divide its pieces.
    """
    spec = problem_spec(problem)
    return (
        problem.n % ROWS_PER_TILE == 0
        and problem.k % 32 == 0
        and log2_k_tiles_per_group(
            problem.group or problem.k, problem.k, K_TILE // spec.groups_per_tile
        )
        is not None
        and config_for(spec, problem.k, problem.groups) is not None
    )


def supports_operands(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None
) -> bool:
    """Whether all are packed and 16-byte aligned, each row of the weight a multiple of 16 bytes."""
    if weight.shape[1] % 16 or not weight.is_contiguous() or x.stride(1) != 1:
        return False
    return not any(t is not None and t.data_ptr() % 16 for t in (x, weight, scale, offset))


def supports_groupwise(inputs: GroupwiseLinearInputs) -> bool:
    """``supports_operands`` of these."""
    return supports_operands(*inputs[:4])


def groupwise_gemv(inputs: GroupwiseLinearInputs, *, gated: bool) -> torch.Tensor:
    """The product of one row with a weight in groups of 4 or 8 bits."""
    x, weight, scale, offset, group, bias = inputs
    grids = (scale, offset, group)
    return wq_gemv(x, weight, grids, (None, None, bias), x.dtype, gated=gated)


def make_gemv_kernel(*, gated: bool) -> Kernel:
    """The kernel of one row of the weight-only GEMMs."""
    run = functools.partial(groupwise_gemv, gated=gated)
    return Kernel(GemmSupportRange(m=(1, 1), fits=supports_problem), run, supports_groupwise)


def weight_tensor_map_geometry(
    rows: int, width: int, *, gated: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes, strides in bytes and box of a weight's rows, ``width`` bytes each; gated: two halves.

    The halves' rows of one tile are loaded together.
    """
    if gated:
        return (rows // 2, 2), (width, rows // 2 * width), (ROWS_PER_TILE // 2, 2)
    return (rows,), (width,), (ROWS_PER_TILE,)


class WqGemvLaunch(NamedTuple):
    """A launch: macros, threads, shared memory, tiles and the packed sizes."""

    macros: tuple[str, ...]
    threads: int
    shared_bytes: int
    tiles: int
    sizes: tuple[int, ...]
    gated: bool

    def weight_map_geometry_in_words(
        self, width: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Sizes, strides and box, in words, of the weight's tensor map; GATED loads both halves."""
        sizes, strides, box = weight_tensor_map_geometry(self.sizes[0], width, gated=self.gated)
        return (width // 4, *sizes), strides, (LINE_BYTES // 4, *box)


def plan_launch(
    spec: WqGemvSpec,
    size: tuple[int, int],
    group: int,
    groups: int,
    dtype: torch.dtype,
    *,
    gated: bool,
) -> WqGemvLaunch:
    """Plan a launch for a weight of ``size`` rows and columns.

    dtype: of the output, and of x unless it is int8.
    """
    rows, columns = size
    shape, by = (
        config_for(spec, columns, groups),
        log2_k_tiles_per_group(group, columns, K_TILE // spec.groups_per_tile),
    )
    assert shape is not None and by is not None  # noqa: PT018  checked by supports_weight
    slots = 8 // spec.bits * spec.groups_per_tile  # groups of a line, where pieces do not share one
    mixed = spec.bits == 4 and spec.groups_per_tile > 1
    together = (
        slots > 1 and not mixed and not spec.float32_scales and by == 0 and groups % slots == 0
    )
    sizes = {
        "BITS": spec.bits,
        "INT8_INPUT": spec.int8_input,
        "OFFSET": spec.offset,
        "SCALE_FP32": spec.float32_scales,
        "GATED": gated,
    }
    sizes |= {
        "GROUPS": spec.groups_per_tile,
        "SINGLE_LINE": shape.lines <= shape.warps,
        "VECTOR_SCALES": together,
        "WARPS": shape.warps,
    }
    sizes |= {"STAGES": shape.stages, "SCALE_STAGES": shape.tiles_in_flight}
    macros = (*(f"{name}={int(size)}" for name, size in sizes.items()), *DTYPE_DEFINES[dtype])
    numbers = (rows, columns, groups, by, rows // ROWS_PER_TILE, shape.lines)
    return WqGemvLaunch(
        macros, 32 * shape.warps, shared_bytes(spec, shape), rows // ROWS_PER_TILE, numbers, gated
    )


def wq_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    grids: tuple[torch.Tensor, torch.Tensor | None, int],
    epilogue: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Compute x [1, K] · weightᵀ → [1, N] of ``dtype``, or SwiGLU of its halves [1, N / 2].

    grids: scale and offset [N, G], columns of a group. epilogue: step [G], constant [N], bias [N].
    """
    scale, offset, group = grids
    rows, columns = weight.shape[0], x.shape[1]
    spec = operand_spec(x, weight, scale, offset, group)
    plan = plan_launch(spec, (rows, columns), group, scale.numel() // rows, dtype, gated=gated)
    out = torch.empty((1, rows // 2 if gated else rows), dtype=dtype, device=x.device)
    device = x.get_device()
    with torch.cuda.device(x.device):
        kernel = launch.compile_and_load_kernel(
            "wq_gemv", "wq_gemv", plan.macros, plan.threads, plan.shared_bytes, device
        )
        pointers = launch.data_pointers(x, scale, offset, *epilogue, out)
        there = launch.tensor_map(
            weight.data_ptr(), torch.int32, *plan.weight_map_geometry_in_words(weight.stride(0))
        )
        work = struct.pack("=7Q6i", *pointers, *plan.sizes)
        kernel.launch(min(plan.tiles, launch.sm_count(device)), there, work, pdl=True)
    return out


def operand_spec(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
) -> WqGemvSpec:
    """What the kernel is compiled for."""
    return problem_spec(make_gemm_problem(x, weight, scale, group=group, offset=offset))


def problem_spec(problem: GemmProblem) -> WqGemvSpec:
    """What the kernel is compiled for."""
    bits = 4 if problem.weight_dtype is torch.uint8 else 8
    integer, group = problem.dtype is torch.int8, problem.group or problem.k
    groups = K_TILE // group if group in (32, 64) and not integer and group < problem.k else 1
    wide = problem.scale_dtype is torch.float32
    return WqGemvSpec(bits, integer, problem.offset, wide, groups)
