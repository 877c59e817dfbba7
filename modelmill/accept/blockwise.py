"""A quantized matrix row by row and tile by tile: what the whole matrix's errors hide.

Two rows that changed places, one scale that is wrong, a tile of a wrong copy: in a matrix of
hundreds of rows each moves the sums over all of it by less than rounding does, but its own row or
tile by much more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.metrics import INFINITE, ErrorMetrics, incomparable_metrics

TILE_SIZE = 32
# Weights measured at a time: on a CPU their float64 copies stay in its cache, which is most of the
# speed.
CHUNK_WEIGHTS = {"cpu": 1 << 17, "cuda": 1 << 24}
MEDIAN_ROW_STRIDE = 8  # of so many rows one tells its median
# Of the mean energy of all rows, what a quiet row counts as at least: one scale for a whole matrix
# rounds quiet rows coarsely, and they matter little.
MIN_ENERGY_RATIO = 0.25


def compare_matrix(name: str, ours: Tensor, expected: Tensor) -> tuple[ErrorMetrics, ErrorMetrics]:
    """``compare_blocks`` of a matrix that is there as a whole."""
    return compare_blocks(name, [(ours, expected)])


def compare_blocks(
    name: str, blocks: Iterable[tuple[Tensor, Tensor]]
) -> tuple[ErrorMetrics, ErrorMetrics]:
    """A matrix whose blocks of rows [n, K] come one by one, (ours, expected): the whole of it, and
    its worst parts.

    Computed in float64 where ``expected`` lies. Of all blocks but the last n is a multiple of 32.
    Where one cannot be compared (another shape, NaN), both rows tell that.

    The whole's gain is <ours, expected> / <expected, expected> over the weights within their row's
    root mean square: there rounding is unbiased. Farther out a searched grid clips, and least
    squares pulls values in: for a matrix of 16 levels the plain gain is off by 0.01–0.04, this one
    by less than 0.01. median_abs: the median of every eighth row's.

    The parts: rel_l2 of the row that errs most; gain of the row where it is most off; max_rel the
    error of the worst tile of 32 × 32 as a share of its size, or of the mean tile's where that is
    larger; cosine the least of all rows; mean_abs and median_abs of the rows' rel_l2.
    """
    measured, numbers = [], 0
    for ours, expected in blocks:
        if ours.shape != expected.shape:
            return incomparable_metrics(name), incomparable_metrics(f"{name}.worst_block")
        measured += _measure_in_threads(list(_row_chunks(ours, expected)))
        numbers += expected.numel()
    every = RowAndTileErrors(*(torch.cat(parts).cpu() for parts in zip(*measured, strict=True)))
    if not bool(torch.isfinite(every.max_abs_error).all()):
        return incomparable_metrics(name), incomparable_metrics(f"{name}.worst_block")
    return _matrix_metrics(name, numbers, every), _worst_block_metrics(f"{name}.worst_block", every)


def _row_chunks(ours: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of tiles at a time."""
    wide = max(expected.shape[1], 1)
    rows = max(CHUNK_WEIGHTS[expected.device.type] // wide // TILE_SIZE, 1) * TILE_SIZE
    yield from zip(ours.split(rows), expected.split(rows), strict=True)


def _measure_in_threads(chunks: list[tuple[Tensor, Tensor]]) -> list[RowAndTileErrors]:
    """On a CPU each thread takes whole pieces: threads that share one would wait for each other at
    every operation, which takes twenty times as long where somebody else needs a core."""
    threads = min(torch.get_num_threads(), len(chunks))
    if threads == 1 or chunks[0][1].device.type != "cpu":
        return _measure_chunks(chunks)
    before = torch.get_num_threads()
    try:
        # the number of threads is each thread's own, and what those that begin later are given
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            every = -(-len(chunks) // threads)
            shares = [chunks[i : i + every] for i in range(0, len(chunks), every)]
            return [each for found in pool.map(_measure_chunks, shares) for each in found]
    finally:
        torch.set_num_threads(before)


def _measure_chunks(chunks: list[tuple[Tensor, Tensor]]) -> list[RowAndTileErrors]:
    """One after another in the same memory."""
    room = torch.empty(3, *chunks[0][1].shape, dtype=torch.float64, device=chunks[0][1].device)
    return [_measure_chunk(*part, room[:, : len(part[1])]) for part in chunks]


class RowAndTileErrors(NamedTuple):
    """Of each row [N] float64: squares of what is expected, of the error, their product (along);
    the product and the squares within the root mean square (within, kept); the sum of the error's
    sizes and, of some rows, their median.
    Of each tile: mean squares, size and error. Of what is measured at once: the largest error and
    number expected."""

    energy: Tensor
    error_energy: Tensor
    error_dot: Tensor
    inlier_error_dot: Tensor
    inlier_energy: Tensor
    abs_error_sum: Tensor
    abs_error_median: Tensor
    tile_energy: Tensor
    tile_error_energy: Tensor
    max_abs_error: Tensor
    max_abs_expected: Tensor

    @property
    def cosine(self) -> Tensor:
        """Of each row; 1 where nothing is expected."""
        ours = (self.energy + 2 * self.error_dot + self.error_energy).clamp(min=0)
        found = (self.energy + self.error_dot) / (self.energy * ours).sqrt().clamp(min=1e-300)
        return torch.where(self.energy > 0, found, torch.ones_like(found))


def _measure_chunk(ours: Tensor, expected: Tensor, scratch: Tensor) -> RowAndTileErrors:
    """scratch: [3, n, K] float64 for what is in between."""
    right, off, squares = scratch
    right.copy_(expected)
    off.copy_(ours).sub_(right)
    torch.mul(right, right, out=squares)
    energy, scale, size = squares.sum(1), squares.max().sqrt(), _tile_means(squares)
    # a row of equal numbers is within, whatever the last bit of its mean
    outside = squares > (energy * ((1 + 1e-12) / max(right.shape[1], 1)))[:, None]
    kept = squares.masked_fill_(outside, 0.0).sum(1)
    product = right.mul_(off)
    along, within = product.sum(1), product.masked_fill_(outside, 0.0).sum(1)
    torch.mul(off, off, out=squares)
    error = off.abs_()
    middle = error[::MEDIAN_ROW_STRIDE].median(1).values
    return RowAndTileErrors(
        energy, squares.sum(1), along, within, kept, error.sum(1), middle, size,
        _tile_means(squares),
        error.max()[None], scale[None],
    )  # fmt: skip


def _matrix_metrics(name: str, num_weights: int, errors: RowAndTileErrors) -> ErrorMetrics:
    """num_weights: how many weights there are."""
    max_abs, scale = float(errors.max_abs_error.max()), float(errors.max_abs_expected.max())
    power, off, along = (
        float(x.sum()) for x in (errors.energy, errors.error_energy, errors.error_dot)
    )
    error, gain, cosine = 0.0, 1.0, 1.0
    if max_abs and power:
        error = math.sqrt(off / power)
        gain += float(errors.inlier_error_dot.sum()) / (float(errors.inlier_energy.sum()) or 1.0)
        cosine = (power + along) / (math.sqrt(power * (power + 2 * along + off)) or INFINITE)
    elif max_abs:
        error, gain, cosine = INFINITE, INFINITE, 0.0
    return ErrorMetrics(
        name,
        max_abs=max_abs,
        mean_abs=float(errors.abs_error_sum.sum()) / num_weights,
        median_abs=float(errors.abs_error_median.median()),
        max_rel=max_abs / scale if scale else error,
        rel_l2=error,
        cosine=cosine,
        gain=gain,
        scale=scale,
    )


def _worst_block_metrics(name: str, errors: RowAndTileErrors) -> ErrorMetrics:
    energy = errors.energy
    if not bool(energy.any()):
        wrong = bool((errors.error_energy != 0).any())  # NaN is not 0 either
        worst = INFINITE if wrong else 0.0
        return ErrorMetrics(name, worst, worst, worst, worst, worst, 1.0 - wrong, 1.0, 1.0)
    counted = energy.clamp(min=MIN_ENERGY_RATIO * float(energy.mean()))
    rows = (errors.error_energy / counted).sqrt()
    gains = errors.error_dot / counted
    tile = float(
        (errors.tile_error_energy / errors.tile_energy.clamp(min=float(errors.tile_energy.mean())))
        .max()
        .sqrt()
    )
    return ErrorMetrics(
        name,
        max_abs=tile,
        mean_abs=float(rows.mean()),
        median_abs=float(rows.median()),
        max_rel=tile,
        rel_l2=float(rows.max()),
        cosine=float(errors.cosine[energy > 0].min()),
        gain=1.0 + float(gains[gains.abs().argmax()]),
        scale=1.0,
    )


def _tile_means(squares: Tensor) -> Tensor:
    """The mean of each tile of squares [N, K], flat; those at the lower and the right edge are
    smaller.
    """
    rows, columns = squares.shape
    missing = (0, -columns % TILE_SIZE, 0, -rows % TILE_SIZE)
    wide = F.pad(squares, missing) if any(missing) else squares
    # a tile's columns first, which lie together
    sums = (
        wide.view(wide.shape[0], -1, TILE_SIZE)
        .sum(2)
        .view(wide.shape[0] // TILE_SIZE, TILE_SIZE, -1)
        .sum(1)
    )
    high, across = (_tile_lengths(length, squares) for length in (rows, columns))
    return (sums / (high[:, None] * across)).flatten()


def _tile_lengths(length: int, like: Tensor) -> Tensor:
    """How much of a length each tile covers."""
    covered = torch.full(
        (-(-length // TILE_SIZE),), float(TILE_SIZE), dtype=like.dtype, device=like.device
    )
    covered[-1:] -= -length % TILE_SIZE
    return covered
