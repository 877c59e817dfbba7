"""How long ``make bench`` may take: rounds that fit into the minutes that are left.

Each work gets an equal share of what is left, so that every line of the table appears. Within a
work all sides have the same rounds, but for peers that take much longer than the fastest one:
transformers in float32 takes seven times as long as the others on a CPU, and would leave them no
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

Clock = Callable[[], float]
SLOW_FACTOR = 3.0
"""Times the fastest peer's round above which a peer is not the one that a ratio is with."""


class TimeBudget:
    """Seconds until the end of the measurements, or no limit.

    They begin with the first work. Engines and files that are made on first use come before: they
    would leave the peers of a slow machine no time.
    """

    def __init__(self, minutes: float | None, clock: Clock = time.perf_counter) -> None:
        """Nothing runs before ``begin``.

        Args:
            minutes: None: no limit.
            clock: seconds.
        """
        self.minutes = minutes
        self._clock = clock
        self._ends: float | None = None

    def begin(self) -> None:
        """Let the time run, from the first call on."""
        if self.minutes is not None and self._ends is None:
            self._ends = self._clock() + 60 * self.minutes

    def left(self) -> float | None:
        """Seconds that are left, at least 0; None without a limit."""
        if self.minutes is None or self._ends is None:
            return None if self.minutes is None else 60 * self.minutes
        return max(0.0, self._ends - self._clock())

    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.left() == 0.0

    def share(self, works_left: int) -> float | None:
        """Seconds for the next of ``works_left`` works; None without a limit."""
        left = self.left()
        return None if left is None else left / max(1, works_left)


def slow_peers(seconds_per_round: Mapping[str, float], engines: Collection[str]) -> set[str]:
    """Return the peers that take much longer than the fastest one, so that no ratio is theirs.

    Args:
        seconds_per_round: by side.
        engines: the sides that are no peers.
    """
    peers = {side: each for side, each in seconds_per_round.items() if side not in engines}
    fastest = min(peers.values(), default=0.0)
    return {side for side, each in peers.items() if each > SLOW_FACTOR * fastest}


def rounds_that_fit(
    seconds_per_round: Mapping[str, float],
    rounds: int,
    seconds: float | None,
    slow: Collection[str] = (),
) -> dict[str, int]:
    """Return the rounds of each side, at least one, the requested ones if they fit.

    All sides have the same number, but for those of ``slow``, which lose rounds first: what is
    compared comes from as many calls of both.

    Args:
        seconds_per_round: by side.
        rounds: requested.
        seconds: for all sides; None: no limit. One round of each side may take longer.
        slow: sides that may have fewer.
    """
    chosen = dict.fromkeys(seconds_per_round, rounds)
    if seconds is None:
        return chosen

    def time_of(side: str) -> float:
        return chosen[side] * seconds_per_round[side]

    while sum(map(time_of, chosen)) > seconds:
        slowest = max((side for side in slow if chosen[side] > 1), key=time_of, default=None)
        fewer = [slowest] if slowest else [side for side in chosen if side not in slow]
        if not fewer or chosen[fewer[0]] == 1:
            break
        for side in fewer:
            chosen[side] -= 1
    return chosen
