"""A quantized matrix row by row and tile by tile: what the whole matrix's errors hide.

Two rows that changed places, one scale that is wrong, a tile of a wrong copy: in a matrix of hundreds of rows each
moves the sums over all of it by less than rounding does, but its own row or tile by much more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.metrics import INFINITE, Row, incomparable

TILE = 32
# Weights measured at a time: on a CPU their float64 copies stay in its cache, which is most of the speed.
AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 24}
SEEN = 8  # of so many rows one tells its median
# Of the mean energy of all rows, what a quiet row counts as at least: one scale for a whole matrix rounds quiet rows
# coarsely, and they matter little.
QUIET = 0.25


def compare_matrix(name: str, ours: Tensor, expected: Tensor) -> tuple[Row, Row]:
    """``compare_blocks`` of a matrix that is there as a whole."""
    return compare_blocks(name, [(ours, expected)])


def compare_blocks(name: str, blocks: Iterable[tuple[Tensor, Tensor]]) -> tuple[Row, Row]:
    """A matrix whose blocks of rows [n, K] come one by one, (ours, expected): the whole of it, and its worst parts.

    Computed in float64 where ``expected`` lies. Of all blocks but the last n is a multiple of 32. Where one cannot be
    compared (another shape, NaN), both rows tell that.

    The whole's gain is <ours, expected> / <expected, expected> over the weights within their row's root mean square:
    there rounding is unbiased. Farther out a searched grid clips, and least squares pulls values in: for a matrix of 16
    levels the plain gain is off by 0.01–0.04, this one by less than 0.01. median_abs: the median of every eighth row's.

    The parts: rel_l2 of the row that errs most; gain of the row where it is most off; max_rel the error of the worst
    tile of 32 × 32 as a share of its size, or of the mean tile's where that is larger; cosine the least of all rows;
    mean_abs and median_abs of the rows' rel_l2.
    """
    measured, numbers = [], 0
    for ours, expected in blocks:
        if ours.shape != expected.shape:
            return incomparable(name), incomparable(f"{name}.parts")
        measured += _all_measured(list(_cut(ours, expected)))
        numbers += expected.numel()
    every = Measured(*(torch.cat(parts).cpu() for parts in zip(*measured, strict=True)))
    if not bool(torch.isfinite(every.most).all()):
        return incomparable(name), incomparable(f"{name}.parts")
    return _whole(name, numbers, every), _worst(f"{name}.parts", every)


def _cut(ours: Tensor, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of tiles at a time."""
    wide = max(expected.shape[1], 1)
    rows = max(AT_ONCE[expected.device.type] // wide // TILE, 1) * TILE
    yield from zip(ours.split(rows), expected.split(rows), strict=True)


def _all_measured(parts: list[tuple[Tensor, Tensor]]) -> list[Measured]:
    """On a CPU each thread takes whole pieces: threads that share one would wait for each other at every operation,
    which takes twenty times as long where somebody else needs a core."""
    threads = min(torch.get_num_threads(), len(parts))
    if threads == 1 or parts[0][1].device.type != "cpu":
        return _some_measured(parts)
    before = torch.get_num_threads()
    try:
        # the number of threads is each thread's own, and what those that begin later are given
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            every = -(-len(parts) // threads)
            shares = [parts[i : i + every] for i in range(0, len(parts), every)]
            return [each for found in pool.map(_some_measured, shares) for each in found]
    finally:
        torch.set_num_threads(before)


def _some_measured(parts: list[tuple[Tensor, Tensor]]) -> list[Measured]:
    """One after another in the same memory."""
    room = torch.empty(3, *parts[0][1].shape, dtype=torch.float64, device=parts[0][1].device)
    return [_measured(*part, room[:, : len(part[1])]) for part in parts]


class Measured(NamedTuple):
    """Of each row [N] float64: squares of what is expected, of the error, their product (along); the product and the
    squares within the root mean square (within, kept); the sum of the error's sizes and, of some rows, their median.
    Of each tile: mean squares, size and error. Of what is measured at once: the largest error and number expected."""

    energy: Tensor
    off: Tensor
    along: Tensor
    within: Tensor
    kept: Tensor
    distance: Tensor
    middle: Tensor
    size: Tensor
    astray: Tensor
    most: Tensor
    scale: Tensor

    @property
    def cosine(self) -> Tensor:
        """Of each row; 1 where nothing is expected."""
        ours = (self.energy + 2 * self.along + self.off).clamp(min=0)
        found = (self.energy + self.along) / (self.energy * ours).sqrt().clamp(min=1e-300)
        return torch.where(self.energy > 0, found, torch.ones_like(found))


def _measured(ours: Tensor, expected: Tensor, room: Tensor) -> Measured:
    """room: [3, n, K] float64 for what is in between."""
    right, off, squares = room
    right.copy_(expected)
    off.copy_(ours).sub_(right)
    torch.mul(right, right, out=squares)
    energy, scale, size = squares.sum(1), squares.max().sqrt(), _tiles(squares)
    # a row of equal numbers is within, whatever the last bit of its mean
    outside = squares > (energy * ((1 + 1e-12) / max(right.shape[1], 1)))[:, None]
    kept = squares.masked_fill_(outside, 0.0).sum(1)
    product = right.mul_(off)
    along, within = product.sum(1), product.masked_fill_(outside, 0.0).sum(1)
    torch.mul(off, off, out=squares)
    error = off.abs_()
    middle = error[::SEEN].median(1).values
    return Measured(
        energy, squares.sum(1), along, within, kept, error.sum(1), middle, size, _tiles(squares), error.max()[None],
        scale[None],
    )  # fmt: skip


def _whole(name: str, numbers: int, told: Measured) -> Row:
    """numbers: how many weights there are."""
    max_abs, scale = float(told.most.max()), float(told.scale.max())
    power, off, along = (float(x.sum()) for x in (told.energy, told.off, told.along))
    error, gain, cosine = 0.0, 1.0, 1.0
    if max_abs and power:
        error = math.sqrt(off / power)
        gain += float(told.within.sum()) / (float(told.kept.sum()) or 1.0)
        cosine = (power + along) / (math.sqrt(power * (power + 2 * along + off)) or INFINITE)
    elif max_abs:
        error, gain, cosine = INFINITE, INFINITE, 0.0
    return Row(
        name,
        max_abs=max_abs,
        mean_abs=float(told.distance.sum()) / numbers,
        median_abs=float(told.middle.median()),
        max_rel=max_abs / scale if scale else error,
        rel_l2=error,
        cosine=cosine,
        gain=gain,
        scale=scale,
    )


def _worst(name: str, told: Measured) -> Row:
    energy = told.energy
    if not bool(energy.any()):
        wrong = bool((told.off != 0).any())  # NaN is not 0 either
        worst = INFINITE if wrong else 0.0
        return Row(name, worst, worst, worst, worst, worst, 1.0 - wrong, 1.0, 1.0)
    counted = energy.clamp(min=QUIET * float(energy.mean()))
    rows = (told.off / counted).sqrt()
    gains = told.along / counted
    tile = float((told.astray / told.size.clamp(min=float(told.size.mean()))).max().sqrt())
    return Row(
        name,
        max_abs=tile,
        mean_abs=float(rows.mean()),
        median_abs=float(rows.median()),
        max_rel=tile,
        rel_l2=float(rows.max()),
        cosine=float(told.cosine[energy > 0].min()),
        gain=1.0 + float(gains[gains.abs().argmax()]),
        scale=1.0,
    )


def _tiles(square: Tensor) -> Tensor:
    """The mean of each tile of squares [N, K], flat; those at the lower and the right edge are smaller."""
    rows, columns = square.shape
    missing = (0, -columns % TILE, 0, -rows % TILE)
    wide = F.pad(square, missing) if any(missing) else square
    # a tile's columns first, which lie together
    sums = wide.view(wide.shape[0], -1, TILE).sum(2).view(wide.shape[0] // TILE, TILE, -1).sum(1)
    high, across = (_lengths(length, square) for length in (rows, columns))
    return (sums / (high[:, None] * across)).flatten()


def _lengths(length: int, like: Tensor) -> Tensor:
    """How much of a length each tile covers."""
    covered = torch.full((-(-length // TILE),), float(TILE), dtype=like.dtype, device=like.device)
    covered[-1:] -= -length % TILE
    return covered
