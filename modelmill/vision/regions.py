"""Connected regions of masks: fill small holes and drop small islands, as SAM's generator does."""

from __future__ import annotations

import numpy as np


def remove_small_regions(mask: np.ndarray, min_pixels: int) -> tuple[np.ndarray, bool]:
    """Fill holes, then drop islands, of fewer than ``min_pixels`` pixels.

    Regions are 8-connected. If all islands are small, the largest is kept.

    Args:
        mask: [H, W] bool.
        min_pixels: size from which a region is kept.

    Returns:
        The new mask, and whether it differs.
    """
    labels, sizes = label_regions(~mask)
    small = sizes < min_pixels
    filled = mask | np.append(False, small)[labels]
    labels, sizes = label_regions(filled)
    keep = sizes >= min_pixels
    islands_dropped = not keep.all()
    if len(sizes) and not keep.any():
        keep[sizes.argmax()] = True
    return (np.append(False, keep)[labels] if islands_dropped else filled), bool(
        small.any()
    ) or islands_dropped


def label_regions(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Label the 8-connected regions of a mask, numbered by their first pixel, row by row.

    Returns:
        Labels [H, W] int64 (0 outside of the mask, 1 … R inside it), and sizes [R] in pixels.
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
    """Return pairs of touching runs in neighbouring rows: indices of the lower and the upper."""
    stride = int(ends.max()) + 2
    # runs as positions in one line, so that bisection finds those above; corners touch, hence one
    # pixel more on each side
    first = np.searchsorted(rows * stride + ends, (rows - 1) * stride + starts, side="left")
    last = np.searchsorted(rows * stride + starts, (rows - 1) * stride + ends, side="right")
    counts = np.maximum(last - first, 0)
    lower = np.repeat(np.arange(len(rows)), counts)
    upper = (
        np.arange(counts.sum())
        - np.repeat(np.cumsum(counts) - counts, counts)
        + np.repeat(first, counts)
    )
    return lower, upper


def _merge_runs(count: int, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Return the first run of its region for each of ``count`` runs."""
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
