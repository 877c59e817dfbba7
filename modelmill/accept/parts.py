"""A quantized matrix row by row and tile by tile: what the whole matrix's errors hide.

Two rows that changed places, one scale that is wrong, a tile of a wrong copy: in a matrix of hundreds of rows each
moves the sums over all of it by less than rounding does, but its own row or tile by much more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.metrics import INFINITE, Row

TILE = 32
# Of the mean energy of all rows, what a quiet row counts as at least: one scale for a whole matrix rounds quiet rows
# coarsely, and they matter little.
QUIET = 0.25


def worst_parts(name: str, ours: Tensor, expected: Tensor) -> Row:
    """[N, K] of one shape each, finite. rel_l2: of the row that errs most; gain: of the row where it is most off.

    max_rel: the error of the worst tile of 32 × 32 as a share of its size, or of the mean tile's where that is larger.
    cosine: the least of all rows. mean_abs and median_abs: of the rows' rel_l2.
    """
    right = expected.double()
    off = ours.double() - right
    energy = right.square().sum(1)
    if not bool(energy.any()):
        worst = INFINITE if bool(off.any()) else 0.0
        return Row(name, worst, worst, worst, worst, worst, 1.0 - bool(off.any()), 1.0, 1.0)
    counted = energy.clamp(min=QUIET * float(energy.mean()))
    rows = (off.square().sum(1) / counted).sqrt()
    gains = (off * right).sum(1) / counted
    size = _tiles(right)
    tile = float((_tiles(off) / size.clamp(min=float(size.mean()))).max().sqrt())
    cosines = F.cosine_similarity(off + right, right, dim=1)[energy > 0]
    return Row(
        name,
        max_abs=tile,
        mean_abs=float(rows.mean()),
        median_abs=float(rows.median()),
        max_rel=tile,
        rel_l2=float(rows.max()),
        cosine=float(cosines.min()),
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
