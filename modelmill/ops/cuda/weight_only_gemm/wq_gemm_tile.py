"""Host side of wq_gemm_tile.cuh: formats of a weight, shared memory of a block and its launch."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    K_TILE,
    k_tile_for,
    log2_k_tiles_per_group,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.kernel_support import GemmProblem

SPLIT_K_CHOICES = (1, 2, 3, 4)  # blocks of a cluster that share K
BLOCK_N = 128  # weight rows of a block
_MAX_SHARED_BYTES = 222 << 10  # bytes of a block at most
_MAX_STAGES = 8
_BARRIER_BYTES = 16  # of a stage, of a buffer of scales
_EPILOGUE_ROW_PITCH = BLOCK_N + 4  # floats from one row of results to the next
_MIN_GROUP = 32  # columns of a group at least
_THREADS = 3 * 128  # two warpgroups that multiply, one that loads


class WqSpec(NamedTuple):
    """Format of a weight: bits, columns, group size, offsets and scale dtype.

    k_tile: columns of a K tile of the kernel.
    """

    bits: int
    columns: int
    group: int
    offset: bool
    float32_scales: bool = False
    k_tile: int = K_TILE

    @property
    def k_tiles(self) -> int:
        """Number of tiles along K."""
        return -(-self.columns // self.k_tile)

    @property
    def log2_k_tiles_per_group(self) -> int | None:
        """K tiles that share a scale, as a power of two; None where that is none."""
        return log2_k_tiles_per_group(self.group, self.columns, self.k_tile // self.groups_per_tile)

    @property
    def groups_per_tile(self) -> int:
        """Groups of a K tile: 1, 2 or 4."""
        return self.k_tile // k_tile_for(self.group, self.columns, self.k_tile)

    @property
    def needs_input_sums(self) -> bool:
        """Whether the offsets need group sums of x."""
        return self.bits == 4 or self.offset

    @property
    def tile_bytes(self) -> int:
        """Bytes of a K tile of a block's weight rows."""
        return BLOCK_N * self.k_tile * self.bits // 8

    def groups_per_split(self, split_k: int) -> int:
        """Most groups that one of ``split_k`` blocks that share K touches."""
        each, by = -(-self.k_tiles // split_k), self.log2_k_tiles_per_group or 0
        if self.groups_per_tile > 1:
            return each * self.groups_per_tile
        ends = [(begin, min(begin + each, self.k_tiles)) for begin in range(0, self.k_tiles, each)]
        return max(((end - 1) >> by) - (begin >> by) + 1 for begin, end in ends)


def problem_weight_spec(problem: GemmProblem, k_tile: int = K_TILE) -> WqSpec:
    """The format of the weight of a product."""
    return WqSpec(
        4 if problem.weight_dtype is torch.uint8 else 8,
        problem.k,
        problem.group or problem.k,
        problem.offset,
        problem.scale_dtype is torch.float32,
        k_tile,
    )


def supports_weight(rows: int, spec: WqSpec, *, gated: bool) -> bool:
    """Whether the kernels serve such a weight.

    The group size must be supported, outputs a multiple of 8, and scales float16 if group
    sums of x are needed.
    """
    return (
        spec.log2_k_tiles_per_group is not None
        and spec.k_tile // spec.groups_per_tile >= _MIN_GROUP
        and rows % (16 if gated else 8) == 0
        and not (spec.float32_scales and spec.needs_input_sums)
    )


class BlockSmemPlan(NamedTuple):
    """Shared memory of a block of ``block_m`` rows of x that has 1 / ``split_k`` of K.

    scale_buffers: tiles whose scales it holds.
    """

    spec: WqSpec
    block_m: int
    split_k: int
    scale_buffers: int = 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of a K tile: weights and columns of x."""
        return self.spec.tile_bytes + self.block_m * self.spec.k_tile * 2

    @property
    def scale_pitch(self) -> int:
        """Scales from one weight row to the next; odd, so that rows are in different banks."""
        return self.spec.groups_per_split(self.split_k) | 1

    @property
    def scale_and_barrier_bytes(self) -> int:
        """Bytes of the scales of a block's groups, and of their barriers."""
        size = 4 if self.spec.offset or self.spec.float32_scales else 2
        return self.scale_buffers * (BLOCK_N * self.scale_pitch * size + _BARRIER_BYTES)

    @property
    def num_stages(self) -> int:
        """K tiles on their way beside the scales."""
        left = _MAX_SHARED_BYTES - self.scale_and_barrier_bytes
        return min(_MAX_STAGES, left // (self.stage_bytes + _BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        """Bytes of all."""
        return self.num_stages * (self.stage_bytes + _BARRIER_BYTES) + self.scale_and_barrier_bytes

    def fits(self, min_k_tiles: int, min_stages: int, *, holds_results: bool = True) -> bool:
        """Whether the scales leave room for K tiles enough, and for the results where they were.

        min_k_tiles: that a block of a cluster is worth. holds_results: they pass shared memory.
        """
        if self.spec.log2_k_tiles_per_group is None or (
            self.split_k > 1 and self.spec.k_tiles < min_k_tiles * self.split_k
        ):
            return False
        stages = self.num_stages
        results = self.block_m * _EPILOGUE_ROW_PITCH * 4
        return stages >= min_stages and (not holds_results or stages * self.stage_bytes >= results)

    def macros(self, *, gated: bool) -> tuple[str, ...]:
        """Macros of wq_gemm_tile.cuh and the kernels beside the dtype's."""
        sizes = {
            "BITS": self.spec.bits,
            "GROUPS": self.spec.groups_per_tile,
            "BLOCK_M": self.block_m,
            "SPLIT": self.split_k,
            "STAGES": self.num_stages,
            "GATED": gated,
            "OFFSET": self.spec.offset,
            "SCALE_FP32": self.spec.float32_scales,
        }
        return tuple(f"{name}={int(size)}" for name, size in sizes.items())


class WeightTileRange(NamedTuple):
    """Part of a weight that a launch multiplies: tiles of 128 rows from ``first`` on."""

    first: int
    number: int


def count_weight_tiles(rows: int) -> int:
    """Tiles of a weight."""
    return -(-rows // BLOCK_N)


def empty_gemm_output(x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """The output of a product, not yet written."""
    rows = weight.shape[0]
    return torch.empty((len(x), rows // 2 if gated else rows), dtype=x.dtype, device=x.device)


def launch_gemm(
    kernel_name: str,
    memory: BlockSmemPlan,
    macros: tuple[str, ...],
    inputs: GroupwiseLinearInputs,
    out: torch.Tensor,
    part_bytes: int,
    tiles: WeightTileRange,
    max_blocks: int | None = None,
    *,
    gated: bool,
) -> None:
    """Launch a kernel of wq_gemm_tile.cuh.

    Args:
        kernel_name: of the source and the function.
        memory: of a block.
        macros: of the source.
        inputs: x [M, K], which may be a copy in the kernel's order, and the weight.
        out: [M, N], gated [M, N / 2].
        part_bytes: contiguous bytes in shared memory of a row of a K tile of the weight.
        tiles: what is multiplied.
        max_blocks: the launch has no more, so that a block may compute several tiles; None: one
            each.
        gated: with SwiGLU.
    """
    x, weight, scale, offset, _, bias = inputs
    spec, rows, tokens = memory.spec, weight.shape[0], x.shape[0]
    assert spec.log2_k_tiles_per_group is not None
    shift = spec.log2_k_tiles_per_group if spec.groups_per_tile == 1 else 0
    m_tiles = -(-tokens // memory.block_m)
    kernel = launch.compile_and_load_kernel(
        kernel_name, kernel_name, macros, _THREADS, memory.shared_bytes, x.get_device()
    )
    x_map = launch.tensor_map(
        x.data_ptr(), x.dtype, (x.shape[1], tokens), (x.stride(0) * 2,), (64, memory.block_m)
    )
    row_bytes, box = weight.shape[1], (part_bytes, BLOCK_N // 2 if gated else BLOCK_N)
    w_map = launch.tensor_map(
        weight.data_ptr(), weight.dtype, (row_bytes, rows), (row_bytes,), box, False
    )
    groups, count = scale.numel() // rows, tiles.number * m_tiles
    pointers = launch.data_pointers(scale, offset, bias, out)
    sizes = (tokens, rows, spec.k_tiles, groups, shift, memory.scale_pitch)
    work = struct.pack("=4Q9i4x", *pointers, *sizes, m_tiles, tiles.first, count)
    blocks = count * memory.split_k
    blocks = blocks if max_blocks is None else min(blocks, max_blocks)
    kernel.launch(blocks, x_map, w_map, work, pdl=True)
