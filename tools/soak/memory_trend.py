"""Checks whether resident memory stays constant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_GROWTH_FRACTION, MIN_GROWTH_MB = 0.02, 8.0
"""Allowed growth: this fraction, and at least so many MB (allocators keep arenas of that size)."""


@dataclass(frozen=True)
class MemoryTrend:
    """A line through memory in MB over time.

    Attributes:
        per_minute: slope of the line.
        growth: growth along the line.
        flat: whether the growth is within the allowed limits.
    """

    per_minute: float
    growth: float
    flat: bool


def fit_trend(
    seconds: Sequence[float], megabytes: Sequence[float], skip: float = 1 / 3
) -> MemoryTrend:
    """Fit a line to a series without its first part, in which caches fill.

    Raises:
        ValueError: there are fewer than 3 points.
    """
    first = int(len(seconds) * skip)
    x, y = np.asarray(seconds[first:], float), np.asarray(megabytes[first:], float)
    if len(x) < 3 or len(x) != len(y):
        raise ValueError(f"{len(x)} and {len(y)} points make no line; at least 3 are needed")
    a, _ = np.polyfit(x - x[0], y, 1)
    growth = float(a * (x[-1] - x[0]))
    return MemoryTrend(
        float(60 * a), growth, growth <= max(MIN_GROWTH_MB, MAX_GROWTH_FRACTION * float(y[0]))
    )
