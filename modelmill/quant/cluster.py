"""Channels in clusters by their (max, min), each cluster in groups of columns that an integer kernel can read.

k-means as RPTQ does it (Yuan et al. 2023, arXiv:2304.01089); then clusters are fitted into a fixed number of groups of
fixed width. A cluster may leave columns of its last group empty; where that would take too many groups, the channels
of such remainders move to other clusters that have room, those first whose error grows least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

CLUSTERS = 32
STARTS = 10
ROUNDS = 50
_TRIED = 6  # remainders looked at each time one has to go


def order_of(low: torch.Tensor, high: torch.Tensor, mass: torch.Tensor, unit: int, groups: int) -> torch.Tensor:
    """Columns → channels, [groups · unit] int32, −1 where a column stays empty.

    low, high: [K], the ends of each channel; mass: [K], what a squared error of the channel costs. K ≤ groups · unit.
    """
    ends = np.stack([high.double().cpu().numpy(), low.double().cpu().numpy()], 1)
    weight = mass.double().cpu().numpy().clip(min=1e-30)
    labels = kmeans(ends, min(CLUSTERS, groups, len(ends)))
    clusters = [np.flatnonzero(labels == c) for c in range(int(labels.max()) + 1)]
    order = np.full((groups, unit), -1, dtype=np.int32)
    at = 0
    for cluster in fitted([c for c in clusters if len(c)], ends, weight, unit, groups):
        for part in split(cluster, ends, unit):
            order[at, : len(part)] = part
            at += 1
    return torch.from_numpy(order.reshape(-1))


def kmeans(points: np.ndarray, count: int, starts: int = STARTS, seed: int = 0) -> np.ndarray:
    """Labels [K] of points [K, D] in at most ``count`` clusters: the best of several starts (k-means++)."""
    generator = np.random.default_rng(seed)
    points = points / (np.abs(points).max() or 1.0)
    size = (points**2).sum(-1)[:, None]
    best, labels = np.inf, np.zeros(len(points), dtype=np.int64)
    for _ in range(starts):
        centres = _spread(points, count, generator)
        for _ in range(ROUNDS):
            away = size - 2 * points @ centres.T + (centres**2).sum(-1)
            found = away.argmin(1)
            sizes = np.bincount(found, minlength=count)
            sums = np.stack([np.bincount(found, points[:, d], minlength=count) for d in range(points.shape[1])], 1)
            moved = np.where(sizes[:, None] > 0, sums / sizes.clip(min=1)[:, None], centres)
            if np.array_equal(moved, centres):
                break
            centres = moved
        total = float(away.min(1).sum())
        if total < best:
            best, labels = total, found
    return labels


def _spread(points: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Starting centres: each next one drawn by the squared distance to those before."""
    chosen = [int(generator.integers(len(points)))]
    away = ((points - points[chosen[0]]) ** 2).sum(-1)
    while len(chosen) < count:
        total = away.sum()
        share = away / total if total > 0 else np.full(len(points), 1 / len(points))
        chosen.append(int(generator.choice(len(points), p=share)))
        away = np.minimum(away, ((points - points[chosen[-1]]) ** 2).sum(-1))
    return points[chosen]


def fitted(
    clusters: Sequence[np.ndarray], ends: np.ndarray, weight: np.ndarray, unit: int, groups: int
) -> list[np.ndarray]:
    """The clusters changed so that together they fill at most ``groups`` groups of ``unit``."""
    found = [np.asarray(c) for c in clusters]
    while sum(-(-len(c) // unit) for c in found) > groups:
        partial = sorted((i for i, c in enumerate(found) if len(c) % unit), key=lambda i: len(found[i]) % unit)
        tried = [_without(found, i, ends, weight, unit) for i in partial[:_TRIED]]
        found = [c for c in min(tried, key=lambda each: each[0])[1] if len(c)]
    return found


def _without(
    clusters: list[np.ndarray], which: int, ends: np.ndarray, weight: np.ndarray, unit: int
) -> tuple[float, list[np.ndarray]]:
    """(what it costs, the clusters) when the remainder of one cluster moves into the empty columns of the others."""
    out = list(clusters)
    mine = out[which]
    wide = ends[mine, 0] - ends[mine, 1]
    leaving = mine[np.argsort(wide, kind="stable")[: len(mine) % unit]]  # those that widen others least
    out[which] = np.setdiff1d(mine, leaving)
    high, low = (
        np.array([f(ends[c, i]) if len(c) else f0 for c in out])
        for i, f, f0 in ((0, np.max, -np.inf), (1, np.min, np.inf))
    )
    held = np.array([weight[c].sum() for c in out])
    room = np.array([-len(c) % unit for c in out])
    room[which] = 0
    before = float(((ends[mine, 0].max() - ends[mine, 1].min()) ** 2) * weight[leaving].sum())
    cost = -before
    for channel in leaving[::-1]:  # the widest first, while there is choice
        tops, bottoms = np.maximum(high, ends[channel, 0]), np.minimum(low, ends[channel, 1])
        grown = (tops - bottoms) ** 2
        was = np.where(np.isfinite(high), (high - low) ** 2, 0.0)
        extra = np.where(room > 0, held * (grown - was) + weight[channel] * grown, np.inf)
        to = int(extra.argmin())
        if not np.isfinite(extra[to]):
            return np.inf, out
        cost += float(extra[to])
        out[to] = np.append(out[to], channel)
        high[to], low[to] = tops[to], bottoms[to]
        held[to] += weight[channel]
        room[to] -= 1
    return cost, out


def split(cluster: np.ndarray, ends: np.ndarray, unit: int) -> list[np.ndarray]:
    """A cluster in groups of at most ``unit`` channels, the widest in the group that is not full."""
    wide = ends[cluster, 0] - ends[cluster, 1]
    ranked = cluster[np.argsort(-wide, kind="stable")]
    first = len(ranked) % unit
    parts = [ranked[:first]] if first else []
    return parts + [ranked[i : i + unit] for i in range(first, len(ranked), unit)]
