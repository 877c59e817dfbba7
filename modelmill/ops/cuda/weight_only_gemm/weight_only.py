"""Shared host code of the small-M weight-only kernels: kernel configs and sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

import torch

from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from modelmill.ops.kernel_support import GemmProblem, GemmSupportRange, Kernel, select_first_kernel

THREADS, K_TILE, PACK_COLUMNS = 256, 128, 32
WARPS = THREADS // 32
DTYPE_DEFINES: dict[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: (),
    torch.float16: ("HALF",),
    torch.float32: ("OUT_FP32",),
}
_MAX_SHARED_BYTES = 200 << 10  # bytes of a block, beside what the kernels take anyway


class WqMmaKernelConfig(NamedTuple):
    """Kernel config of the mma.sync kernels.

    m_tiles: tiles of 8 rows of x; n_warps: warps along N (the others split K);
    prefetch_depth: K tiles in flight per warp; blocks_per_sm: for __launch_bounds__.
    """

    m_tiles: int
    n_warps: int
    prefetch_depth: int
    blocks_per_sm: int

    @property
    def macros(self) -> tuple[str, ...]:
        """Preprocessor macros that select this launch config."""
        return (
            f"M_TILES={self.m_tiles}",
            f"WARPS_N={self.n_warps}",
            f"PREFETCH={self.prefetch_depth}",
            f"BLOCKS={self.blocks_per_sm}",
        )

    def grid(self, rows: int, *, gated: bool = False) -> int:
        """Blocks of a launch over a weight of so many rows."""
        return -(-rows // (2 if gated else 1) // ((8 if gated else 16) * self.n_warps))

    def shared_bytes(self, groups: int) -> int:
        """Bytes of a block's scales and offsets."""
        return 16 * self.n_warps * (groups + 1) * 8


# rows of x up to … → how the kernel is compiled: with many rows a block takes more of N, as x is
# read by each
KERNEL_CONFIGS = (
    (8, WqMmaKernelConfig(1, 1, 2, 3)),
    (16, WqMmaKernelConfig(2, 1, 2, 2)),
    (32, WqMmaKernelConfig(4, 2, 2, 1)),
    (64, WqMmaKernelConfig(8, 4, 1, 1)),
)
MAX_ROWS = KERNEL_CONFIGS[-1][0]
ROW_BLOCK_KERNEL_MAX_ROWS = 192
"""Rows that are multiplied ``MAX_ROWS`` at a time: more are faster with a dequantized weight."""


def config_for(tokens: int) -> WqMmaKernelConfig:
    """How the kernel for so many rows of x is compiled."""
    return next(form for most, form in KERNEL_CONFIGS if tokens <= most)


def fits_shared_memory(config: WqMmaKernelConfig, groups: int) -> bool:
    """Whether a block's scales find room."""
    return config.shared_bytes(groups) <= _MAX_SHARED_BYTES - config.m_tiles * 4096


def k_tile_for(group: int, columns: int, most: int = K_TILE) -> int:
    """Columns that are multiplied at a time, all of one group: ``most``, its half or quarter."""
    return most if group >= columns else gcd(group, most)


def log2_k_tiles_per_group(group: int, columns: int, k_tile: int = K_TILE) -> int | None:
    """How many pieces share a scale, as a power of two; None where it is none."""
    if group >= columns:
        return 30
    pieces = group // k_tile
    return pieces.bit_length() - 1 if group % k_tile == 0 and pieces & (pieces - 1) == 0 else None


def config_row_ranges(
    configs: Sequence[tuple[int, WqMmaKernelConfig]],
) -> Iterator[tuple[tuple[int, int], WqMmaKernelConfig]]:
    """Least and largest number of rows of x of each config; ``configs``: by the largest."""
    least = 1
    for most, config in configs:
        yield (least, most), config
        least = most + 1


def mma_kernels(run: Callable[[GroupwiseLinearInputs], torch.Tensor]) -> tuple[Kernel, ...]:
    """A mma.sync kernel, by its configs; each serves what finds room in shared memory."""

    def fits(config: WqMmaKernelConfig, problem: GemmProblem) -> bool:
        return fits_shared_memory(config, problem.groups)

    return tuple(
        Kernel(GemmSupportRange(m=rows, fits=functools.partial(fits, config)), run)
        for rows, config in config_row_ranges(KERNEL_CONFIGS)
    )


def has_aligned_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x and weight are aligned to 16 bytes, rows of x too."""
    return (
        x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def supports_bias(bias: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the bias is packed and of x's dtype, if there is one."""
    return bias is None or (bias.dtype == dtype and bias.is_contiguous())


def row_block_support_range(
    ranges: Sequence[GemmSupportRange], larger: Callable[[GemmProblem], bool]
) -> GemmSupportRange:
    """The range of ``row_block_kernel``: weights that every range of fewer rows serves.

    larger: whether other kernels serve any number of rows of x with the weight.
    """

    def fits(problem: GemmProblem) -> bool:
        return not larger(problem) and all(
            each.covers_ignoring_m(problem._replace(m=each.m[1])) for each in ranges
        )

    return GemmSupportRange(m=(MAX_ROWS + 1, ROW_BLOCK_KERNEL_MAX_ROWS), fits=fits)


def row_block_kernel(kernels: Sequence[Kernel]) -> Kernel:
    """Multiply ``MAX_ROWS`` rows at a time with kernels of so many.

    kernels: in order of preference, of ``GroupwiseLinearInputs``; together they serve all.
    """

    @functools.lru_cache(maxsize=1024)
    def covering(problem: GemmProblem) -> tuple[Kernel, ...]:
        return tuple(each for each in kernels if each.range.covers(problem))

    def multiply(block: GroupwiseLinearInputs, problem: GemmProblem) -> torch.Tensor:
        kernel = select_first_kernel(covering(problem), problem, block)
        assert kernel is not None, "see row_block_support_range"
        out: torch.Tensor = kernel(block)
        return out

    def run(inputs: GroupwiseLinearInputs) -> torch.Tensor:
        problem, blocks = make_groupwise_problem(*inputs), inputs.x.split(MAX_ROWS)
        return torch.cat(
            [multiply(inputs._replace(x=rows), problem._replace(m=len(rows))) for rows in blocks]
        )

    return Kernel(GemmSupportRange(m=(MAX_ROWS + 1, ROW_BLOCK_KERNEL_MAX_ROWS)), run)
