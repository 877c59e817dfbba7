"""Channels in clusters by their (max, min), each cluster in groups of columns that an integer
kernel can read.

k-means as RPTQ does it (Yuan et al. 2023, arXiv:2304.01089); then clusters are fitted into a fixed
number of groups of fixed width. A cluster may leave columns of its last group empty; where that
would take too many groups, the channels
of such remainders move to other clusters that have room, those first whose error grows least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

MAX_CLUSTERS = 32
KMEANS_RESTARTS = 10
KMEANS_ITERATIONS = 50
_MAX_CANDIDATES = 6  # remainders looked at each time one has to go


def cluster_channels(
    low: torch.Tensor,
    high: torch.Tensor,
    importance: torch.Tensor,
    group_width: int,
    num_groups: int,
) -> torch.Tensor:
    """Columns → channels, [num_groups · group_width] int32, −1 where a column stays empty.

    low, high: [K], the ends of each channel; importance: [K], what a squared error of the channel
    costs. K ≤ num_groups · group_width.
    """
    ends = np.stack([high.double().cpu().numpy(), low.double().cpu().numpy()], 1)
    weight = importance.double().cpu().numpy().clip(min=1e-30)
    labels = kmeans(ends, min(MAX_CLUSTERS, num_groups, len(ends)))
    clusters = [np.flatnonzero(labels == c) for c in range(int(labels.max()) + 1)]
    order = np.full((num_groups, group_width), -1, dtype=np.int32)
    at = 0
    for cluster in fit_to_groups(
        [c for c in clusters if len(c)], ends, weight, group_width, num_groups
    ):
        for part in split_cluster(cluster, ends, group_width):
            order[at, : len(part)] = part
            at += 1
    return torch.from_numpy(order.reshape(-1))


def kmeans(
    points: np.ndarray, num_clusters: int, restarts: int = KMEANS_RESTARTS, seed: int = 0
) -> np.ndarray:
    """Labels [K] of points [K, D] in at most ``num_clusters`` clusters: the best of several starts
    (k-means++).
    """
    generator = np.random.default_rng(seed)
    points = points / (np.abs(points).max() or 1.0)
    size = (points**2).sum(-1)[:, None]
    best, labels = np.inf, np.zeros(len(points), dtype=np.int64)
    for _ in range(restarts):
        centres = _kmeans_plus_plus(points, num_clusters, generator)
        for _ in range(KMEANS_ITERATIONS):
            away = size - 2 * points @ centres.T + (centres**2).sum(-1)
            found = away.argmin(1)
            sizes = np.bincount(found, minlength=num_clusters)
            sums = np.stack(
                [
                    np.bincount(found, points[:, d], minlength=num_clusters)
                    for d in range(points.shape[1])
                ],
                1,
            )
            moved = np.where(sizes[:, None] > 0, sums / sizes.clip(min=1)[:, None], centres)
            if np.array_equal(moved, centres):
                break
            centres = moved
        total = float(away.min(1).sum())
        if total < best:
            best, labels = total, found
    return labels


def _kmeans_plus_plus(
    points: np.ndarray, num_clusters: int, generator: np.random.Generator
) -> np.ndarray:
    """Starting centres: each next one drawn by the squared distance to those before."""
    chosen = [int(generator.integers(len(points)))]
    away = ((points - points[chosen[0]]) ** 2).sum(-1)
    while len(chosen) < num_clusters:
        total = away.sum()
        share = away / total if total > 0 else np.full(len(points), 1 / len(points))
        chosen.append(int(generator.choice(len(points), p=share)))
        away = np.minimum(away, ((points - points[chosen[-1]]) ** 2).sum(-1))
    return points[chosen]


def fit_to_groups(
    clusters: Sequence[np.ndarray],
    ranges: np.ndarray,
    importance: np.ndarray,
    group_width: int,
    num_groups: int,
) -> list[np.ndarray]:
    """The clusters changed so that together they fill at most ``num_groups`` groups of
    ``group_width``.
    """
    found = [np.asarray(c) for c in clusters]
    while sum(-(-len(c) // group_width) for c in found) > num_groups:
        partial = sorted(
            (i for i, c in enumerate(found) if len(c) % group_width),
            key=lambda i: len(found[i]) % group_width,
        )
        tried = [
            _move_remainder(found, i, ranges, importance, group_width)
            for i in partial[:_MAX_CANDIDATES]
        ]
        found = [c for c in min(tried, key=lambda each: each[0])[1] if len(c)]
    return found


def _move_remainder(
    clusters: list[np.ndarray],
    index: int,
    ranges: np.ndarray,
    importance: np.ndarray,
    group_width: int,
) -> tuple[float, list[np.ndarray]]:
    """(what it costs, the clusters) when the remainder of one cluster moves into the empty columns
    of the others.
    """
    out = list(clusters)
    mine = out[index]
    wide = ranges[mine, 0] - ranges[mine, 1]
    # those that widen others least
    leaving = mine[np.argsort(wide, kind="stable")[: len(mine) % group_width]]
    out[index] = np.setdiff1d(mine, leaving)
    high, low = (
        np.array([f(ranges[c, i]) if len(c) else f0 for c in out])
        for i, f, f0 in ((0, np.max, -np.inf), (1, np.min, np.inf))
    )
    held = np.array([importance[c].sum() for c in out])
    room = np.array([-len(c) % group_width for c in out])
    room[index] = 0
    before = float(
        ((ranges[mine, 0].max() - ranges[mine, 1].min()) ** 2) * importance[leaving].sum()
    )
    cost = -before
    for channel in leaving[::-1]:  # the widest first, while there is choice
        tops, bottoms = np.maximum(high, ranges[channel, 0]), np.minimum(low, ranges[channel, 1])
        grown = (tops - bottoms) ** 2
        was = np.where(np.isfinite(high), (high - low) ** 2, 0.0)
        extra = np.where(room > 0, held * (grown - was) + importance[channel] * grown, np.inf)
        to = int(extra.argmin())
        if not np.isfinite(extra[to]):
            return np.inf, out
        cost += float(extra[to])
        out[to] = np.append(out[to], channel)
        high[to], low[to] = tops[to], bottoms[to]
        held[to] += importance[channel]
        room[to] -= 1
    return cost, out


def split_cluster(cluster: np.ndarray, ranges: np.ndarray, group_width: int) -> list[np.ndarray]:
    """A cluster in groups of at most ``group_width`` channels, the widest in the group that is not
    full.
    """
    wide = ranges[cluster, 0] - ranges[cluster, 1]
    ranked = cluster[np.argsort(-wide, kind="stable")]
    first = len(ranked) % group_width
    parts = [ranked[:first]] if first else []
    return parts + [ranked[i : i + group_width] for i in range(first, len(ranked), group_width)]
