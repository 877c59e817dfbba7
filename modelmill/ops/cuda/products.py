"""Products with 16-bit weights by Hopper's copy engine and tensor cores: few_rows.cu for decoding, many_rows.cu for
prompts (``rope_linear`` has the other kernel of many_rows.cuh).

Few rows: as fast as the weights come from memory; a block for each multiprocessor, each weight read once. Many rows:
the gate joined to its two products, whose results would otherwise travel through memory.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from modelmill.ops.cuda import launch

TYPES = {torch.bfloat16: (), torch.float16: ("HALF",)}
# Sizes of many_rows.cuh.
TILE_ROWS, DEPTH, STAGES, MANY_THREADS = 128, 64, 4, 384
TILE_WIDES = (256, 224)  # rows of the weight of a tile
BAND = 8
# Of few_rows.cu: columns of the output a block, as (PARTS, WIDE); shared memory that a block may take.
WIDTHS = ((1, 32), (1, 64), (1, 96), (1, 128), (2, 96), (2, 128))
MOST_ROWS = 64
# Up to as many rows: columns of the output for each multiprocessor that are served. With few rows Triton's smaller
# programs leave room for their neighbours in a step, and win where a block would be wide; from 33 to 47 cuBLAS wins.
SERVED = ((1, 0), (16, 32), (32, 256), (47, 0), (MOST_ROWS, 256))
LEAST_BYTES = 4 << 20
LEAST_MANY = 512
LEAST_FILLED = 0.945  # measured: at 0.948 4 to 5 % faster than cuBLAS and the gate, at 0.94 as fast, at 0.90 8 % slower
MOST_SHARED, BARRIERS = 227 << 10, 16 * 16


@dataclass(frozen=True)
class Sizes:
    """Launch sizes of few_rows.cu: its macros. box: rows of x, padded; span: slabs of 64 columns a stage."""

    box: int
    parts: int
    wide: int
    span: int
    stages: int
    cluster: int
    invite: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.stages * self.span * (self.box + self.parts * self.wide) * 128 + 16 * self.stages

    def macros(self, dtype: torch.dtype, *, gated: bool) -> tuple[str, ...]:
        """As the compiler takes them."""
        sizes = {"BOX": self.box, "WIDE": self.wide, "PARTS": self.parts, "SPAN": self.span, "STAGES": self.stages}
        words = [f"{name}={value}" for name, value in sizes.items()]
        words += [f"CLUSTER={self.cluster}", f"GATED={int(gated)}", f"INVITE={int(self.invite)}"]
        return (*words, *TYPES[dtype])


def box_of(rows: int) -> int:
    """Rows of x, padded: 8, 16, 32, 64, 128, 256."""
    return max(8, 1 << (rows - 1).bit_length())


def sizes_of(rows: int, columns: int, multiprocessors: int, *, gated: bool) -> Sizes:
    """Launch sizes for ``columns`` of output: the narrowest blocks of which each multiprocessor needs one at most.

    Nearly all shared memory is a ring of weights: what of it is filled while the kernel in front computes is time won.
    """
    box = box_of(rows)
    widths = [(2, wide) for wide in (32, 64, 96, 128)] if gated else WIDTHS
    each = [wide if gated else parts * wide for parts, wide in widths]
    index = next((i for i, width in enumerate(each) if -(-columns // width) <= multiprocessors), len(each) - 1)
    parts, wide = widths[index]
    span = 2 if parts * wide <= 64 else 1
    stage = span * (box + parts * wide) * 128
    stages = max(2, min(16, (MOST_SHARED - BARRIERS) // stage))
    return Sizes(box, parts, wide, span, stages, 2 if box >= 32 and parts * wide >= 192 else 1)


def copyable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read or write x [R, C]: packed rows that begin at multiples of 16 bytes."""
    return x.dim() == 2 and x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def few_serves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether ``few`` takes these and is worth it (``SERVED``): a matrix that does not live in the cache, one turn.

    cuBLAS reads matrices that need a second turn of the blocks as fast.
    """
    if x.dim() != 2 or x.shape[0] > MOST_ROWS or weight.nbytes < LEAST_BYTES or not readable(x, weight, bias):
        return False
    most = next(columns for rows, columns in SERVED if x.shape[0] <= rows)
    return weight.shape[0] <= most * launch.multiprocessors(x.get_device())


def many_serves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernel for many rows takes these and is worth it: its tiles fill the multiprocessors to the end."""
    if x.dim() != 2 or weight.shape[0] % 16 or not readable(x, weight, bias):
        return False
    return worth(x.shape[0], weight.shape[0], launch.multiprocessors(x.get_device()))


def many_forms(x: torch.Tensor, weight: torch.Tensor, most: int) -> list[int]:
    """Numbers of rows, up to ``most``, with which every form of ``many`` is met: the least that each width serves."""
    if weight.shape[0] % 16 or not readable(x.new_empty((1, x.shape[1])), weight, None):
        return []
    sizes = (weight.shape[0], launch.multiprocessors(x.get_device()))
    least: dict[int, int] = {}
    for rows in tried(most):
        if worth(rows, *sizes):
            least.setdefault(wide_of(rows, *sizes), rows)
    return list(least.values())


def tried(most: int) -> list[int]:
    """Numbers of rows, up to ``most``, among which each form of a kernel for many rows is met if any number meets it:
    tiles fill best at the end of a stretch of them."""
    return sorted({*range(LEAST_MANY, most + 1, 2 * TILE_ROWS), most})


def pairs_of(rows: int, outputs: int, wide: int) -> int:
    """Pairs of tiles of ``rows`` of x, ``wide`` of ``outputs`` each."""
    return -(-rows // (2 * TILE_ROWS)) * -(-outputs // wide)


@functools.lru_cache(4096)
def worth(
    rows: int,
    outputs: int,
    multiprocessors: int,
    wides: tuple[int, ...] = TILE_WIDES,
    least: float = LEAST_FILLED,
) -> bool:
    """Whether a kernel for many rows is faster than what it replaces. least: what its tiles must fill."""
    return rows >= LEAST_MANY and filled(rows, outputs, multiprocessors, wides) >= least


def ring_bytes(wide: int) -> int:
    """Shared memory of many_rows.cuh's ring, and of its barriers."""
    return STAGES * ((TILE_ROWS + wide) * DEPTH * 2 + 16)


def tiled(x: torch.Tensor, columns: int, each: int, other: int) -> tuple[int, tuple[int, ...]]:
    """Blocks, and the Sizes of many_rows.cuh, of an output of ``columns`` in tiles of ``each``.

    other: how far the second half of a tile's rows of the weight lies behind the first.
    """
    tokens, k = x.shape
    pairs = min(launch.multiprocessors(x.get_device()) // 2, pairs_of(tokens, columns, each))
    return 2 * pairs, (tokens, columns, -(-k // DEPTH), -(-columns // each), each, other)


def turns(pairs: int, multiprocessors: int) -> int:
    """Pairs of tiles that a pair of multiprocessors computes one after the other."""
    return -(-pairs // max(1, multiprocessors // 2))


def wide_of(rows: int, outputs: int, multiprocessors: int, wides: tuple[int, ...] = TILE_WIDES) -> int:
    """The width of tiles that are computed first: as many turns, each as long as a tile is wide."""
    return min(wides, key=lambda wide: wide * turns(pairs_of(rows, outputs, wide), multiprocessors))


def filled(rows: int, outputs: int, multiprocessors: int, wides: tuple[int, ...] = TILE_WIDES) -> float:
    """The share of the multiprocessors' time in which tiles compute what is there, of ``rows`` of x and a weight of
    ``outputs`` rows."""
    pairs = pairs_of(rows, outputs, wide_of(rows, outputs, multiprocessors, wides))
    there = rows / (-(-rows // (2 * TILE_ROWS)) * 2 * TILE_ROWS)
    return there * pairs / (turns(pairs, multiprocessors) * max(1, multiprocessors // 2))


def readable(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """16 bits on a GPU, laid out for the copy engine; the bias packed and of the same type."""
    if not x.is_cuda or x.dtype not in TYPES or weight.dtype != x.dtype or not (copyable(x) and copyable(weight)):
        return False
    return bias is None or (bias.dtype == x.dtype and bias.is_contiguous())


def few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    sizes: Sizes | None = None,
) -> None:
    """out = x · weightᵀ (+ bias); where out is half as wide as that, silu(first half) · second half.

    x: [T, K], weight: [N, K], out: [T, N] or [T, N / 2], N even.
    """
    tokens, columns = out.shape
    gated = columns != weight.shape[0]
    device = x.get_device()
    with torch.cuda.device(x.device):
        made = sizes or sizes_of(tokens, columns, launch.multiprocessors(device), gated=gated)
        threads = max(1, made.box // 64) * 128 + 32
        kernel = launch.kernel("few_rows", "few_rows", made.macros(x.dtype, gated=gated), threads, made.shared, device)
        width = made.wide if gated else made.parts * made.wide
        blocks = -(-columns // width)
        blocks = -(-blocks // made.cluster) * made.cluster
        stages = -(-x.shape[1] // (64 * made.span))
        pointers = (0 if bias is None else bias.data_ptr(), out.data_ptr())
        work = struct.pack("=2Q4i", *pointers, tokens, columns, stages, out.stride(0))
        box = made.wide if gated else width
        kernel.launch(blocks, box_map(x, made.box // made.cluster), box_map(weight, box), work, early=True)


def many(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    wide: int | None = None,
    band: int = BAND,
) -> None:
    """out = silu(first half) · second half of x · weightᵀ (+ bias). x: [T, K], weight: [2 N, K], out: [T, N].

    N is a multiple of 8. wide: one of TILE_WIDES, by default the one with the least to compute.
    """
    tokens, columns = out.shape
    device = x.get_device()
    with torch.cuda.device(x.device):
        wide = wide or wide_of(tokens, 2 * columns, launch.multiprocessors(device))
        macros = (f"WIDE={wide}", f"BIAS={int(bias is not None)}", f"BAND={band}", *TYPES[x.dtype])
        shared = ring_bytes(wide) + 2 * 64 * (wide // 2) * 2
        kernel = launch.kernel("many_rows", "many_rows", macros, MANY_THREADS, shared, device)
        blocks, sizes = tiled(x, columns, wide // 2, columns)
        work = struct.pack("=Q6i", 0 if bias is None else bias.data_ptr(), *sizes)
        # 112 columns are no whole number of swizzled boxes
        leaving = box_map(out, 64) if wide % 128 == 0 else box_map(out, 64, 16, swizzled=False)
        kernel.launch(blocks, box_map(x, TILE_ROWS), box_map(weight, wide // 2), leaving, work, early=True)


def box_map(x: torch.Tensor, rows: int, columns: int = 64, *, swizzled: bool = True) -> bytes:
    """A matrix as the copy engine sees it: boxes of some rows and columns."""
    size = x.element_size()
    sizes, strides = (x.shape[1], x.shape[0]), (x.stride(0) * size,)
    return launch.tensor_map(x.data_ptr(), x.dtype, sizes, strides, (columns, rows), swizzled)
