"""A quantized matrix row by row and tile by tile: what the whole matrix's errors hide.

Two rows that changed places, one scale that is wrong, a tile of a wrong copy: in a matrix of hundreds of rows each
moves the sums over all of it by less than rounding does, but its own row or tile by much more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.metrics import INFINITE, Row, compare_tensors, incomparable

TILE = 32
ROWS = 128 * TILE
# Of the mean energy of all rows, what a quiet row counts as at least: one scale for a whole matrix rounds quiet rows
# coarsely, and they matter little.
QUIET = 0.25


def compare_matrix(name: str, ours: Tensor, expected: Tensor) -> tuple[Row, Row]:
    """``compare_blocks`` of a matrix that is there as a whole, in blocks so that their float64 copies are small."""
    if ours.shape != expected.shape:
        return incomparable(name), incomparable(f"{name}.parts")
    return compare_blocks(name, zip(ours.split(ROWS), expected.split(ROWS), strict=True))


def compare_blocks(name: str, blocks: Iterable[tuple[Tensor, Tensor]]) -> tuple[Row, Row]:
    """A matrix whose blocks of rows [n, K] come one by one, (ours, expected): the whole of it, and its worst parts.

    Of all blocks but the last n is a multiple of 32. Where one cannot be compared (another shape, NaN), both rows tell
    that.

    The whole's gain is <ours, expected> / <expected, expected> over the weights within their row's root mean square:
    there rounding is unbiased. Farther out a searched grid clips, and least squares pulls values in: for a matrix of 16
    levels the plain gain is off by 0.01–0.04, this one by less than 0.01. median_abs: the median of the blocks'.

    The parts: rel_l2 of the row that errs most; gain of the row where it is most off; max_rel the error of the worst
    tile of 32 × 32 as a share of its size, or of the mean tile's where that is larger; cosine the least of all rows;
    mean_abs and median_abs of the rows' rel_l2.
    """
    rows, measured = [], []
    for ours, expected in blocks:
        row = compare_tensors(name, ours, expected)
        if not row.finite:
            return row, incomparable(f"{name}.parts")
        rows.append(row)
        measured.append(_measured(ours, expected))
    every = Measured(*(torch.cat(parts) for parts in zip(*measured, strict=True)))
    return _whole(name, rows, [len(one.energy) for one in measured], every), _worst(f"{name}.parts", every)


class Measured(NamedTuple):
    """Of each row [N] float64: squares of what is expected, of the error, their product (along), and the cosine; the
    product and the squares within the root mean square (within, kept). Of each tile: mean squares, size and error."""

    energy: Tensor
    off: Tensor
    along: Tensor
    cosine: Tensor
    within: Tensor
    kept: Tensor
    size: Tensor
    astray: Tensor


def _measured(ours: Tensor, expected: Tensor) -> Measured:
    right = expected.double()
    off = ours.double() - right
    kept = _central(right)
    return Measured(
        right.square().sum(1),
        off.square().sum(1),
        (off * right).sum(1),
        F.cosine_similarity(off + right, right, dim=1),
        (off * kept).sum(1),
        kept.square().sum(1),
        _tiles(right).flatten(),
        _tiles(off).flatten(),
    )


def _central(right: Tensor) -> Tensor:
    """The values within their row's root mean square, 0 elsewhere."""
    return right * (right.abs() <= right.square().mean(-1, keepdim=True).sqrt())


def _whole(name: str, rows: list[Row], sizes: list[int], told: Measured) -> Row:
    """rows: each block's own comparison; sizes: its rows."""
    max_abs, scale = max(row.max_abs for row in rows), max(row.scale for row in rows)
    power, off, along = (float(x.sum()) for x in (told.energy, told.off, told.along))
    error, gain, cosine = 0.0, 1.0, 1.0
    if max_abs and power:
        error = math.sqrt(off / power)
        gain += float(told.within.sum()) / (float(told.kept.sum()) or 1.0)
        cosine = (power + along) / (math.sqrt(power * (power + 2 * along + off)) or INFINITE)
    elif max_abs:
        error, gain, cosine = INFINITE, INFINITE, 0.0
    means = sum(row.mean_abs * size for row, size in zip(rows, sizes, strict=True))
    return Row(
        name,
        max_abs=max_abs,
        mean_abs=means / sum(sizes),
        median_abs=statistics.median(row.median_abs for row in rows),
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


def _tiles(x: Tensor) -> Tensor:
    """The mean square of each tile of [N, K]; those at the lower and the right edge are smaller."""
    rows, columns = x.shape
    wide = F.pad(x.square(), (0, -columns % TILE, 0, -rows % TILE))
    count = F.pad(torch.ones_like(x), (0, -columns % TILE, 0, -rows % TILE))
    shape = (wide.shape[0] // TILE, TILE, wide.shape[1] // TILE, TILE)
    return wide.view(shape).sum((1, 3)) / count.view(shape).sum((1, 3))
