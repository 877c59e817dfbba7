"""How long ``make bench`` may take: rounds that fit into the minutes that are left.

Each work gets an equal share of what is left, so that every line of the table appears. Within a
work the side whose rounds take longest loses rounds first: transformers in float32 takes seven
times as long as the others on a CPU, and would leave them no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Clock = Callable[[], float]


class TimeBudget:
    """Seconds until the end of a run, or no limit."""

    def __init__(self, minutes: float | None, clock: Clock = time.perf_counter) -> None:
        """Begin now.

        Args:
            minutes: None: no limit.
            clock: seconds.
        """
        self.minutes = minutes
        self._clock = clock
        self._ends = None if minutes is None else clock() + 60 * minutes

    def left(self) -> float | None:
        """Seconds that are left, at least 0; None without a limit."""
        return None if self._ends is None else max(0.0, self._ends - self._clock())

    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.left() == 0.0

    def share(self, works_left: int) -> float | None:
        """Seconds for the next of ``works_left`` works; None without a limit."""
        left = self.left()
        return None if left is None else left / max(1, works_left)


def rounds_that_fit(
    seconds_per_round: Mapping[str, float], rounds: int, seconds: float | None
) -> dict[str, int]:
    """Return the rounds of each side, at least one, the requested ones if they fit.

    Args:
        seconds_per_round: by side.
        rounds: requested.
        seconds: for all sides; None: no limit. One round of each side may take longer.
    """
    chosen = dict.fromkeys(seconds_per_round, rounds)
    if seconds is None:
        return chosen

    def time_of(side: str) -> float:
        return chosen[side] * seconds_per_round[side]

    while sum(map(time_of, chosen)) > seconds:
        reducible = [side for side, count in chosen.items() if count > 1]
        if not reducible:
            break
        chosen[max(reducible, key=time_of)] -= 1
    return chosen
