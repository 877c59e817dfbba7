"""Clusters channels by (max, min) and assigns clusters to groups of columns of one width.

k-means follows RPTQ (Yuan et al. 2023, arXiv:2304.01089); then clusters are fitted into a fixed
number of groups of fixed width, which an integer kernel requires. A cluster may leave columns of
its last group empty; if that takes too many groups, the channels of such remainders move to other
clusters with free columns, those first whose error grows least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

MAX_CLUSTERS = 32
KMEANS_RESTARTS = 10
KMEANS_ITERATIONS = 50
_MAX_REMAINDER_CANDIDATES = 6  # remainders considered whenever one has to move


def cluster_channels(
    low: torch.Tensor,
    high: torch.Tensor,
    importance: torch.Tensor,
    group_width: int,
    num_groups: int,
) -> torch.Tensor:
    """Return the channel of each column, [num_groups · group_width] int32; −1 for an empty column.

    Args:
        low: [K], minimum of each channel.
        high: [K], maximum of each channel.
        importance: [K], weight of the channel's squared error.
        group_width: columns of a group.
        num_groups: groups; K ≤ num_groups · group_width.
    """
    ends = np.stack([high.double().cpu().numpy(), low.double().cpu().numpy()], 1)
    weight = importance.double().cpu().numpy().clip(min=1e-30)
    labels = kmeans(ends, min(MAX_CLUSTERS, num_groups, len(ends)))
    clusters = [np.flatnonzero(labels == c) for c in range(int(labels.max()) + 1)]
    order = np.full((num_groups, group_width), -1, dtype=np.int32)
    at = 0
    for cluster in fit_clusters_to_groups(
        [c for c in clusters if len(c)], ends, weight, group_width, num_groups
    ):
        for part in split_cluster_into_groups(cluster, ends, group_width):
            order[at, : len(part)] = part
            at += 1
    return torch.from_numpy(order.reshape(-1))


def kmeans(points: np.ndarray, num_clusters: int) -> np.ndarray:
    """Cluster points [K, D] into at most ``num_clusters`` clusters; return labels [K].

    The result is the best of several starts (k-means++).
    """
    generator = np.random.default_rng(0)
    points = points / (np.abs(points).max() or 1.0)
    size = (points**2).sum(-1)[:, None]
    best, labels = np.inf, np.zeros(len(points), dtype=np.int64)
    for _ in range(KMEANS_RESTARTS):
        centres = _choose_initial_centres(points, num_clusters, generator)
        for _ in range(KMEANS_ITERATIONS):
            away = size - 2 * points @ centres.T + (centres**2).sum(-1)
            nearest = away.argmin(1)
            sizes = np.bincount(nearest, minlength=num_clusters)
            sums = np.stack(
                [
                    np.bincount(nearest, points[:, d], minlength=num_clusters)
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
            best, labels = total, nearest
    return labels


def _choose_initial_centres(
    points: np.ndarray, num_clusters: int, generator: np.random.Generator
) -> np.ndarray:
    """Choose starting centres; far points are more probable (squared distance)."""
    chosen = [int(generator.integers(len(points)))]
    away = ((points - points[chosen[0]]) ** 2).sum(-1)
    while len(chosen) < num_clusters:
        total = away.sum()
        share = away / total if total > 0 else np.full(len(points), 1 / len(points))
        chosen.append(int(generator.choice(len(points), p=share)))
        away = np.minimum(away, ((points - points[chosen[-1]]) ** 2).sum(-1))
    return points[chosen]


def fit_clusters_to_groups(
    clusters: Sequence[np.ndarray],
    ranges: np.ndarray,
    importance: np.ndarray,
    group_width: int,
    num_groups: int,
) -> list[np.ndarray]:
    """Change the clusters so that they fill at most ``num_groups`` groups of ``group_width``."""
    groups = [np.asarray(c) for c in clusters]
    while sum(-(-len(c) // group_width) for c in groups) > num_groups:
        partial = sorted(
            (i for i, c in enumerate(groups) if len(c) % group_width),
            key=lambda i: len(groups[i]) % group_width,
        )
        tried = [
            _move_cluster_remainder(groups, i, ranges, importance, group_width)
            for i in partial[:_MAX_REMAINDER_CANDIDATES]
        ]
        groups = [c for c in min(tried, key=lambda each: each[0])[1] if len(c)]
    return groups


def _move_cluster_remainder(
    clusters: list[np.ndarray],
    index: int,
    ranges: np.ndarray,
    importance: np.ndarray,
    group_width: int,
) -> tuple[float, list[np.ndarray]]:
    """Move the remainder of one cluster into the empty columns of the others.

    Returns:
        The cost and the changed clusters.
    """
    out = list(clusters)
    channels = out[index]
    wide = ranges[channels, 0] - ranges[channels, 1]
    # first the channels that widen other clusters least
    leaving = channels[np.argsort(wide, kind="stable")[: len(channels) % group_width]]
    out[index] = np.setdiff1d(channels, leaving)
    high, low = (
        np.array([f(ranges[c, i]) if len(c) else f0 for c in out])
        for i, f, f0 in ((0, np.max, -np.inf), (1, np.min, np.inf))
    )
    importance_sums = np.array([importance[c].sum() for c in out])
    room = np.array([-len(c) % group_width for c in out])
    room[index] = 0
    before = float(
        ((ranges[channels, 0].max() - ranges[channels, 1].min()) ** 2) * importance[leaving].sum()
    )
    cost = -before
    for channel in leaving[
        ::-1
    ]:  # the channel with the widest range first, while all clusters have room
        tops, bottoms = np.maximum(high, ranges[channel, 0]), np.minimum(low, ranges[channel, 1])
        grown = (tops - bottoms) ** 2
        was = np.where(np.isfinite(high), (high - low) ** 2, 0.0)
        extra = np.where(
            room > 0, importance_sums * (grown - was) + importance[channel] * grown, np.inf
        )
        to = int(extra.argmin())
        if not np.isfinite(extra[to]):
            return np.inf, out
        cost += float(extra[to])
        out[to] = np.append(out[to], channel)
        high[to], low[to] = tops[to], bottoms[to]
        importance_sums[to] += importance[channel]
        room[to] -= 1
    return cost, out


def split_cluster_into_groups(
    cluster: np.ndarray, ranges: np.ndarray, group_width: int
) -> list[np.ndarray]:
    """Split a cluster into groups of at most ``group_width`` channels.

    The channels with the widest ranges go into the partial group.
    """
    wide = ranges[cluster, 0] - ranges[cluster, 1]
    ranked = cluster[np.argsort(-wide, kind="stable")]
    first = len(ranked) % group_width
    parts = [ranked[:first]] if first else []
    return parts + [ranked[i : i + group_width] for i in range(first, len(ranked), group_width)]
