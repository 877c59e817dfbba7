"""Compares a quantized matrix row by row and tile by tile, where local errors are visible.

Two swapped rows, one wrong scale, a tile copied from elsewhere: in a matrix of hundreds of rows
each changes the total error by less than rounding does, but that of its own row or tile by much
more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.error_metrics import (
    INFINITE_ERROR,
    MAX_GAIN_DEVIATION_SIGMAS,
    ErrorMetrics,
    incomparable_metrics,
)

TILE_SIZE = 32
# Weights processed at a time, so that float64 copies stay in the CPU cache, which decides the
# speed.
MAX_WEIGHTS_PER_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}
# Above so many weights the gain of a matrix of 16 levels has a standard deviation below 0.002, and
# it is not estimated.
MAX_WEIGHTS_FOR_GAIN_STD = 1 << 16
MEDIAN_ROW_STRIDE = 8  # one of so many rows contributes its median
# Smallest energy of a row, as a share of the mean: one scale for a matrix rounds quiet rows
# coarsely, and they matter little.
ROW_ENERGY_FLOOR_SHARE = 0.25


def compare_matrix(name: str, ours: Tensor, expected: Tensor) -> tuple[ErrorMetrics, ErrorMetrics]:
    """Return ``compare_matrix_row_blocks`` of a whole matrix in memory."""
    return compare_matrix_row_blocks(name, [(ours, expected)])


def compare_matrix_row_blocks(
    name: str, blocks: Iterable[tuple[Tensor, Tensor]]
) -> tuple[ErrorMetrics, ErrorMetrics]:
    """Compare a matrix that comes in blocks of rows [n, K], (ours, expected).

    It is computed in float64 on the device of ``expected``. n is a multiple of 32 in all blocks but
    the last. If a block cannot be compared (another shape, NaN), both results are incomparable.

    The gain of the whole is <ours, expected> / <expected, expected> over the weights within their
    row's root mean square: there rounding is unbiased. Beyond it a searched grid clips, and least
    squares shrinks values: for a matrix of 16 levels the plain gain is off by 0.01–0.04, this one
    by less than 0.01. In a small matrix chance moves it (gain_std).
    median_abs: the median of every eighth row's.

    The second result describes the worst parts: rel_l2 of the row with the largest error; gain of
    the row with the largest deviation; max_rel the error of the worst 32 × 32 tile relative to its
    magnitude, or to the mean tile's if that is larger; cosine the smallest of all rows; mean_abs
    and median_abs of the rows' rel_l2.

    Returns:
        The metrics of the whole matrix, and those of its worst parts.
    """
    measured, numbers = [], 0
    few: list[tuple[Tensor, Tensor]] = []
    for ours, expected in blocks:
        if ours.shape != expected.shape:
            return incomparable_metrics(name), incomparable_metrics(f"{name}.worst_block")
        measured += _measure_chunks_in_threads(list(_row_chunks(ours, expected)))
        numbers += expected.numel()
        few = [*few, (ours, expected)] if numbers <= MAX_WEIGHTS_FOR_GAIN_STD else []
    every = RowAndTileErrors(*(torch.cat(parts).cpu() for parts in zip(*measured, strict=True)))
    if not bool(torch.isfinite(every.max_abs_error).all()):
        return incomparable_metrics(name), incomparable_metrics(f"{name}.worst_block")
    whole = _matrix_metrics(name, numbers, every)
    if few and whole.is_finite:
        ours, expected = (torch.cat(parts).double() for parts in zip(*few, strict=True))
        whole = replace(whole, gain_std=_estimate_gain_std(ours, expected))
    return whole, _worst_block_metrics(f"{name}.worst_block", every)


def _estimate_gain_std(ours: Tensor, expected: Tensor) -> float:
    """Return one standard deviation of the gain of weights within their row's root mean square.

    The common factor is taken out of the errors first, so that a wrong factor does not excuse
    itself. The rest may be larger in some rows than in others, which the second estimate allows
    for; the first is steadier for few weights, and the larger counts. Both are estimated from the
    same few weights, so that a bound of four deviations is that of Student's t distribution, to
    first order in 1 / freedom. A single weight leaves no rest, and nothing to tell chance from a
    factor by.
    """
    squares = expected.square()
    inside = squares <= squares.mean(1, keepdim=True) * (1 + 1e-12)
    right, error = expected[inside], (ours.to(expected.device) - expected)[inside]
    energy, count = float(right @ right), right.numel()
    if not energy or count < 2:
        return 0.0
    rest = error - float(error @ right) / energy * right
    freedom = count - 1
    same_size = float(rest.norm()) / math.sqrt(freedom * energy)
    own_sizes = float((rest * right).norm()) / energy * math.sqrt(count / freedom)
    return max(same_size, own_sizes) * (1 + (MAX_GAIN_DEVIATION_SIGMAS**2 + 1) / (4 * freedom))


def _row_chunks(ours: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a few rows of tiles at a time."""
    wide = max(expected.shape[1], 1)
    rows = max(MAX_WEIGHTS_PER_CHUNK[expected.device.type] // wide // TILE_SIZE, 1) * TILE_SIZE
    yield from zip(ours.split(rows), expected.split(rows), strict=True)


def _measure_chunks_in_threads(chunks: list[tuple[Tensor, Tensor]]) -> list[RowAndTileErrors]:
    """Measure chunks, on a CPU one thread per chunk.

    If threads shared a chunk they would synchronise at every operation, which takes twenty times as
    long on busy cores.
    """
    threads = min(torch.get_num_threads(), len(chunks))
    if threads == 1 or chunks[0][1].device.type != "cpu":
        return _measure_chunks_sequentially(chunks)
    before = torch.get_num_threads()
    try:
        # the thread count is a per-thread setting, inherited by threads started later
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            every = -(-len(chunks) // threads)
            shares = [chunks[i : i + every] for i in range(0, len(chunks), every)]
            return [
                each for errors in pool.map(_measure_chunks_sequentially, shares) for each in errors
            ]
    finally:
        torch.set_num_threads(before)


def _measure_chunks_sequentially(chunks: list[tuple[Tensor, Tensor]]) -> list[RowAndTileErrors]:
    """Measure chunks one after another in the same scratch memory."""
    room = torch.empty(3, *chunks[0][1].shape, dtype=torch.float64, device=chunks[0][1].device)
    return [_measure_chunk_errors(*part, room[:, : len(part[1])]) for part in chunks]


class RowAndTileErrors(NamedTuple):
    """Sums of each row [N] float64 and of each tile.

    Of a row: squares of the expected values, of the error, their product (error_dot); the product
    and the squares within the root mean square (within, kept); the sum of absolute errors and, of
    some rows, their median. Of a tile: mean squares of values and error. Of the chunk: the largest
    error and expected value.
    """

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
    def row_cosines(self) -> Tensor:
        """Return the cosine of each row; 1 where the expected row is zero."""
        ours = (self.energy + 2 * self.error_dot + self.error_energy).clamp(min=0)
        cosine = (self.energy + self.error_dot) / (self.energy * ours).sqrt().clamp(min=1e-300)
        return torch.where(self.energy > 0, cosine, torch.ones_like(cosine))


def _measure_chunk_errors(ours: Tensor, expected: Tensor, scratch: Tensor) -> RowAndTileErrors:
    """Measure one chunk.

    scratch: [3, n, K] float64 for intermediates.
    """
    right, off, squares = scratch
    right.copy_(expected)
    off.copy_(ours).sub_(right)
    torch.mul(right, right, out=squares)
    energy, scale, size = squares.sum(1), squares.max().sqrt(), _tile_means(squares)
    # a constant row counts as within, whatever the last bit of its mean
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
    """Combine the errors of the chunks.

    num_weights: number of weights.
    """
    max_abs, scale = float(errors.max_abs_error.max()), float(errors.max_abs_expected.max())
    power, off, along = (
        float(x.sum()) for x in (errors.energy, errors.error_energy, errors.error_dot)
    )
    error, gain, cosine = 0.0, 1.0, 1.0
    if max_abs and power:
        error = math.sqrt(off / power)
        gain += float(errors.inlier_error_dot.sum()) / (float(errors.inlier_energy.sum()) or 1.0)
        cosine = (power + along) / (math.sqrt(power * (power + 2 * along + off)) or INFINITE_ERROR)
    elif max_abs:
        error, gain, cosine = INFINITE_ERROR, INFINITE_ERROR, 0.0
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
        worst = INFINITE_ERROR if wrong else 0.0
        return ErrorMetrics(name, worst, worst, worst, worst, worst, 1.0 - wrong, 1.0, 1.0)
    counted = energy.clamp(min=ROW_ENERGY_FLOOR_SHARE * float(energy.mean()))
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
        cosine=float(errors.row_cosines[energy > 0].min()),
        gain=1.0 + float(gains[gains.abs().argmax()]),
        scale=1.0,
    )


def _tile_means(squares: Tensor) -> Tensor:
    """Return the mean of each tile of squares [N, K], flat; edge tiles are smaller."""
    rows, columns = squares.shape
    missing = (0, -columns % TILE_SIZE, 0, -rows % TILE_SIZE)
    wide = F.pad(squares, missing) if any(missing) else squares
    # sum over a tile's columns first, which are contiguous
    sums = (
        wide.view(wide.shape[0], -1, TILE_SIZE)
        .sum(2)
        .view(wide.shape[0] // TILE_SIZE, TILE_SIZE, -1)
        .sum(1)
    )
    high, across = (_tile_lengths(length, squares) for length in (rows, columns))
    return (sums / (high[:, None] * across)).flatten()


def _tile_lengths(length: int, like: Tensor) -> Tensor:
    """Return the length of each tile along a dimension."""
    covered = torch.full(
        (-(-length // TILE_SIZE),), float(TILE_SIZE), dtype=like.dtype, device=like.device
    )
    covered[-1:] -= -length % TILE_SIZE
    return covered
