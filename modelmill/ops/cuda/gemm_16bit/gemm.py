"""GEMMs with 16-bit weights by TMA and wgmma: gemm_small_m.cu and gemm_swiglu_large_m.cu.

The former serves decode, the latter prefill; ``qkv_rope_cache`` has the other kernel of
gemm_large_m.cuh.

Few rows: as fast as the weights come from memory; a block for each SM, each weight read
once. Many rows: the gate joined to its two products, whose results would otherwise travel through
memory.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.kernel_support import HALF_DTYPES, UNBOUNDED, GemmProblem, GemmSupportRange

DTYPE_DEFINES = {torch.bfloat16: (), torch.float16: ("HALF",)}
# Sizes of gemm_large_m.cuh.
LARGE_M_TILE_ROWS = 128
LARGE_M_K_TILE = 64
STAGES = 4
LARGE_M_THREADS = 384
LARGE_M_TILE_WIDTHS = (256, 224)  # rows of the weight of a tile
TILES_PER_BAND = 8
# Of gemm_small_m.cu: columns of the output a block, as (PARTS, BLOCK_N); shared memory that a block
# may take.
SMALL_M_PARTS_AND_BLOCK_N = ((1, 32), (1, 64), (1, 96), (1, 128), (2, 96), (2, 128))
SMALL_M_MAX_ROWS = 64
# Rows, and the most columns of the output for each SM that are served with so many. With few rows
# Triton's smaller programs leave room for their neighbours in a step, and win where a block would
# be wide; from 33 to 47 cuBLAS wins.
SMALL_M_MAX_COLUMNS_PER_SM_BY_ROWS = (((2, 16), 32), ((17, 32), 256), ((48, SMALL_M_MAX_ROWS), 256))
MIN_WEIGHT_BYTES = 4 << 20
LARGE_M_MIN_ROWS = 512
MIN_TILE_EFFICIENCY = (
    # measured: at 0.948 4 to 5 % faster than cuBLAS and the gate, at 0.94 as fast, at 0.90 8 %
    # slower
    0.945
)
MAX_SHARED_BYTES, BARRIER_BYTES = 227 << 10, 16 * 16


@dataclass(frozen=True)
class GemmSmallMKernelConfig:
    """Kernel config of gemm_small_m.cu: its macros.

    padded_rows: rows of x, padded; slabs_per_stage: K slabs of 64 columns per stage.
    """

    padded_rows: int
    parts: int
    width: int
    slabs_per_stage: int
    stages: int
    cluster: int
    pdl_at_start: bool = False

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return (
            self.stages * self.slabs_per_stage * (self.padded_rows + self.parts * self.width) * 128
            + 16 * self.stages
        )

    def macros(self, dtype: torch.dtype, *, gated: bool) -> tuple[str, ...]:
        """Macros for the compiler."""
        sizes = {
            "BLOCK_M": self.padded_rows,
            "BLOCK_N": self.width,
            "PARTS": self.parts,
            "SLABS_PER_STAGE": self.slabs_per_stage,
            "STAGES": self.stages,
        }
        words = [f"{name}={value}" for name, value in sizes.items()]
        words += [
            f"CLUSTER={self.cluster}",
            f"GATED={int(gated)}",
            f"TRIGGER_AT_START={int(self.pdl_at_start)}",
        ]
        return (*words, *DTYPE_DEFINES[dtype])


def padded_rows(rows: int) -> int:
    """Rows of x, padded: 8, 16, 32, 64, 128, 256."""
    return max(8, 1 << (rows - 1).bit_length())


def small_m_config(rows: int, columns: int, num_sms: int, *, gated: bool) -> GemmSmallMKernelConfig:
    """Config for ``columns`` of output: the narrowest blocks that need at most one per SM.

    Nearly all shared memory is a ring of weights: what of it is filled while the kernel in front
    computes is time won.
    """
    box = padded_rows(rows)
    widths = [(2, wide) for wide in (32, 64, 96, 128)] if gated else SMALL_M_PARTS_AND_BLOCK_N
    each = [wide if gated else parts * wide for parts, wide in widths]
    index = next(
        (i for i, width in enumerate(each) if -(-columns // width) <= num_sms), len(each) - 1
    )
    parts, wide = widths[index]
    span = 2 if parts * wide <= 64 else 1
    stage = span * (box + parts * wide) * 128
    stages = max(2, min(16, (MAX_SHARED_BYTES - BARRIER_BYTES) // stage))
    return GemmSmallMKernelConfig(
        box, parts, wide, span, stages, 2 if box >= 32 and parts * wide >= 192 else 1
    )


def is_tma_compatible(x: torch.Tensor) -> bool:
    """Whether TMA can access x [R, C]: contiguous rows at multiples of 16 bytes."""
    return (
        x.dim() == 2
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def small_m_support_ranges(n_multiple: int) -> tuple[GemmSupportRange, ...]:
    """Products that gemm_small_m serves and is the fastest for.

    The matrix must exceed the cache and need one wave of blocks: cuBLAS reads matrices that need a
    second turn of the blocks as fast.
    """
    return tuple(
        GemmSupportRange(
            m=rows,
            n_multiple=n_multiple,
            dtypes=HALF_DTYPES,
            min_weight_bytes=MIN_WEIGHT_BYTES,
            fits=functools.partial(_fits_one_wave, columns),
        )
        for rows, columns in SMALL_M_MAX_COLUMNS_PER_SM_BY_ROWS
    )


def _fits_one_wave(columns: int, problem: GemmProblem) -> bool:
    return problem.device >= 0 and problem.n <= columns * launch.sm_count(problem.device)


def _is_large_m_problem_faster(problem: GemmProblem) -> bool:
    return problem.device >= 0 and large_m_is_faster(
        problem.m, problem.n, launch.sm_count(problem.device)
    )


# Products that gemm_swiglu_large_m serves and is faster for: its tiles fill the SMs.
LARGE_M_RANGE = GemmSupportRange(
    m=(LARGE_M_MIN_ROWS, UNBOUNDED),
    n_multiple=16,
    dtypes=HALF_DTYPES,
    faster=_is_large_m_problem_faster,
)


def large_m_warmup_rows(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """Numbers of rows up to ``max_rows`` that cover every config of gemm_swiglu_large_m."""
    if weight.shape[0] % 16 or not supports_operands(x.new_empty((1, x.shape[1])), weight, None):
        return []
    sizes = (weight.shape[0], launch.sm_count(x.get_device()))
    least: dict[int, int] = {}
    for rows in large_m_warmup_candidates(max_rows):
        if large_m_is_faster(rows, *sizes):
            least.setdefault(select_tile_width(rows, *sizes), rows)
    return list(least.values())


def large_m_warmup_candidates(max_rows: int) -> list[int]:
    """Candidate numbers of rows up to ``max_rows`` for warming up the large-M kernels.

    Occupancy is highest at multiples of a tile pair, so these cover every config.
    """
    return sorted({*range(LARGE_M_MIN_ROWS, max_rows + 1, 2 * LARGE_M_TILE_ROWS), max_rows})


def count_tile_pairs(rows: int, outputs: int, width: int) -> int:
    """Pairs of tiles of ``rows`` of x, ``width`` of ``outputs`` each."""
    return -(-rows // (2 * LARGE_M_TILE_ROWS)) * -(-outputs // width)


@functools.lru_cache(4096)
def large_m_is_faster(
    rows: int,
    outputs: int,
    num_sms: int,
    widths: tuple[int, ...] = LARGE_M_TILE_WIDTHS,
    min_tile_efficiency: float = MIN_TILE_EFFICIENCY,
) -> bool:
    """Whether a kernel for many rows is faster than what it replaces.

    min_tile_efficiency: the least ``tile_efficiency``.
    """
    return (
        rows >= LARGE_M_MIN_ROWS
        and tile_efficiency(rows, outputs, num_sms, widths) >= min_tile_efficiency
    )


def pipeline_bytes(width: int) -> int:
    """Shared memory of gemm_large_m.cuh's ring, and of its barriers."""
    return STAGES * ((LARGE_M_TILE_ROWS + width) * LARGE_M_K_TILE * 2 + 16)


def plan_tile_launch(
    x: torch.Tensor, columns: int, tile_columns: int, up_offset: int
) -> tuple[int, tuple[int, ...]]:
    """Blocks and sizes (gemm_large_m.cuh) for ``columns`` of output in tiles of ``tile_columns``.

    up_offset: how far the second half of a tile's rows of the weight lies behind the first.
    """
    tokens, k = x.shape
    pairs = min(
        launch.sm_count(x.get_device()) // 2, count_tile_pairs(tokens, columns, tile_columns)
    )
    return 2 * pairs, (
        tokens,
        columns,
        -(-k // LARGE_M_K_TILE),
        -(-columns // tile_columns),
        tile_columns,
        up_offset,
    )


def count_tile_waves(pairs: int, num_sms: int) -> int:
    """Pairs of tiles that a pair of SMs computes one after the other."""
    return -(-pairs // max(1, num_sms // 2))


def select_tile_width(
    rows: int, outputs: int, num_sms: int, widths: tuple[int, ...] = LARGE_M_TILE_WIDTHS
) -> int:
    """The width of tiles that are computed first: as many turns, each as long as a tile is wide."""
    return min(
        widths,
        key=lambda wide: wide * count_tile_waves(count_tile_pairs(rows, outputs, wide), num_sms),
    )


def tile_efficiency(
    rows: int, outputs: int, num_sms: int, widths: tuple[int, ...] = LARGE_M_TILE_WIDTHS
) -> float:
    """Share of the SM time in which tiles compute valid elements: [rows, outputs]."""
    pairs = count_tile_pairs(rows, outputs, select_tile_width(rows, outputs, num_sms, widths))
    there = rows / (-(-rows // (2 * LARGE_M_TILE_ROWS)) * 2 * LARGE_M_TILE_ROWS)
    return there * pairs / (count_tile_waves(pairs, num_sms) * max(1, num_sms // 2))


def supports_operands(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """16 bits on a GPU, laid out for TMA; the bias packed and of the same type."""
    if (
        not x.is_cuda
        or x.dtype not in DTYPE_DEFINES
        or weight.dtype != x.dtype
        or not (is_tma_compatible(x) and is_tma_compatible(weight))
    ):
        return False
    return bias is None or (bias.dtype == x.dtype and bias.is_contiguous())


def gemm_small_m(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Compute out = x · weightᵀ (+ bias), or SwiGLU of its halves if out is half as wide.

    x: [T, K], weight: [N, K], out: [T, N] or [T, N / 2], N even.
    """
    tokens, columns = out.shape
    gated = columns != weight.shape[0]
    device = x.get_device()
    with torch.cuda.device(x.device):
        made = small_m_config(tokens, columns, launch.sm_count(device), gated=gated)
        threads = max(1, made.padded_rows // 64) * 128 + 32
        kernel = launch.compile_and_load_kernel(
            "gemm_small_m",
            "gemm_small_m",
            made.macros(x.dtype, gated=gated),
            threads,
            made.shared_bytes,
            device,
        )
        width = made.width if gated else made.parts * made.width
        blocks = -(-columns // width)
        blocks = -(-blocks // made.cluster) * made.cluster
        stages = -(-x.shape[1] // (64 * made.slabs_per_stage))
        pointers = (0 if bias is None else bias.data_ptr(), out.data_ptr())
        work = struct.pack("=2Q4i", *pointers, tokens, columns, stages, out.stride(0))
        box = made.width if gated else width
        kernel.launch(
            blocks,
            matrix_tensor_map(x, made.padded_rows // made.cluster),
            matrix_tensor_map(weight, box),
            work,
            pdl=True,
        )


def gemm_swiglu_large_m(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    width: int | None = None,
) -> None:  # fmt: skip
    """Compute out = silu(gate) · up of x · weightᵀ (+ bias).

    x: [T, K], weight: [2 N, K] (gate, up), out: [T, N].

    N is a multiple of 8. width: one of LARGE_M_TILE_WIDTHS, by default that of least work.
    """
    tokens, columns = out.shape
    device = x.get_device()
    with torch.cuda.device(x.device):
        width = width or select_tile_width(tokens, 2 * columns, launch.sm_count(device))
        macros = (
            f"BLOCK_N={width}",
            f"BIAS={int(bias is not None)}",
            f"BAND={TILES_PER_BAND}",
            *DTYPE_DEFINES[x.dtype],
        )
        shared = pipeline_bytes(width) + 2 * 64 * (width // 2) * 2
        kernel = launch.compile_and_load_kernel(
            "gemm_swiglu_large_m", "gemm_swiglu_large_m", macros, LARGE_M_THREADS, shared, device
        )
        blocks, sizes = plan_tile_launch(x, columns, width // 2, columns)
        work = struct.pack("=Q6i", 0 if bias is None else bias.data_ptr(), *sizes)
        # 112 columns are no whole number of swizzled boxes
        leaving = (
            matrix_tensor_map(out, 64)
            if width % 128 == 0
            else matrix_tensor_map(out, 64, 16, swizzled=False)
        )
        kernel.launch(
            blocks,
            matrix_tensor_map(x, LARGE_M_TILE_ROWS),
            matrix_tensor_map(weight, width // 2),
            leaving,
            work,
            pdl=True,
        )


def matrix_tensor_map(
    x: torch.Tensor, rows: int, columns: int = 64, *, swizzled: bool = True
) -> bytes:
    """A matrix as a tensor map: boxes of some rows and columns."""
    size = x.element_size()
    sizes, strides = (x.shape[1], x.shape[0]), (x.stride(0) * size,)
    return launch.tensor_map(x.data_ptr(), x.dtype, sizes, strides, (columns, rows), swizzled)
