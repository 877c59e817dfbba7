"""Connected regions of masks: small holes are filled, small islands dropped, as SAM's generator
does it afterwards.
"""

from __future__ import annotations

import numpy as np


def remove_small_regions(mask: np.ndarray, min_pixels: int) -> tuple[np.ndarray, bool]:
    """mask [H, W] bool without holes, then islands, of fewer than ``min_pixels`` pixels; and
    whether that changed it.

    Pixels that touch at a corner belong together. Where all islands are small the largest stays.
    """
    labels, sizes = label_regions(~mask)
    small = sizes < min_pixels
    filled = mask | np.append(False, small)[labels]
    labels, sizes = label_regions(filled)
    keep = sizes >= min_pixels
    islands_go = not keep.all()
    if len(sizes) and not keep.any():
        keep[sizes.argmax()] = True
    return (np.append(False, keep)[labels] if islands_go else filled), bool(
        small.any()
    ) or islands_go


def label_regions(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([H, W] int64, 0 outside of the mask and 1 … R inside it, by region; pixels of each region
    [R]).

    Regions are numbered by their first pixel, row by row. Rows are cut into runs, runs that touch
    are joined.
    """
    height, width = mask.shape
    padded = np.zeros((height, width + 2), dtype=np.int8)
    padded[:, 1:-1] = mask
    edges = np.diff(padded, axis=1)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    if not len(rows):
        return np.zeros(mask.shape, dtype=np.int64), np.zeros(0, dtype=np.int64)
    joined = _merge_runs(len(rows), *_adjacent_runs(rows, starts, ends))
    _, region = np.unique(joined, return_inverse=True)
    sizes = np.bincount(region, weights=ends - starts).astype(np.int64)
    labels = np.zeros(mask.shape, dtype=np.int64)
    labels[mask] = np.repeat(region + 1, ends - starts)
    return labels, sizes


def _adjacent_runs(
    rows: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of runs in neighbouring rows that touch: indices of the lower and of the upper one."""
    wide = int(ends.max()) + 2
    # places in one long line, so that the runs above are found by bisection; a corner is one pixel
    # to each side
    first = np.searchsorted(rows * wide + ends, (rows - 1) * wide + starts, side="left")
    last = np.searchsorted(rows * wide + starts, (rows - 1) * wide + ends, side="right")
    counts = np.maximum(last - first, 0)
    lower = np.repeat(np.arange(len(rows)), counts)
    upper = (
        np.arange(counts.sum())
        - np.repeat(np.cumsum(counts) - counts, counts)
        + np.repeat(first, counts)
    )
    return lower, upper


def _merge_runs(count: int, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """For each of ``count`` runs the first run of its region."""
    root = np.arange(count)
    while True:
        low = np.minimum(root[lower], root[upper])
        best = root.copy()
        np.minimum.at(best, root[lower], low)
        np.minimum.at(best, root[upper], low)
        best = best[best]
        if np.array_equal(best, root):
            return root
        root = best
