"""How many tokens of prompts may join running answers, so that those who read along wait little longer than before.

Measured, not computed: what a step costs depends on the model, the machine, and whatever else runs there. The piece
follows a quantile of the times: a step that took more than ``MOST`` times as long as one without a prompt makes it
smaller, every other one makes it a little larger, until so few are too long as the two rates are to each other.

A single time may be far off: something else took the machine, a kernel was compiled; and where steps are launched
ahead, the one after such a step seems to take no time at all. What was timed is doubted, and timed again soon, where
steps with pieces take much less than it, or where few were timed and nothing stays within the limit.
"""

from __future__ import annotations

import statistics
from collections import deque

MOST = 2.3
"""A step with a piece, over one without. The readers' 99th percentile is to stay below three times their median."""
UP, DOWN = 1.02, 0.75
"""The piece after a step within the limit, and after one beyond: it settles where 6 % of the steps are beyond."""
FIRST_UP = 1.1
"""The same until the first step beyond."""
KEPT = 15
AGAIN, SOON = 64, 8
"""After so many steps with a piece one goes without, to be timed; sooner where far more or fewer answers run."""
SURE = 3
"""Times whose median one of them cannot spoil."""
LONGEST = 1.0
"""Seconds of a step that prompts may fill: whoever asks meanwhile, or leaves, or has just begun, waits for its end."""
WHOLE = 128
"""Tokens of prompts that may fill a step however long they take; fewer would say little about how fast many are."""
MIXED, MIXED_EIGHT = 768, 1024
"""Tokens of a step at which the products of a 7B model run at full speed; the same where their inputs have 8 bits."""


class Pace:
    """Owns the size of the pieces. least, most: bounds in tokens; grain: a piece is a multiple of it."""

    def __init__(self, least: int, most: int, *, first: int | None = None, grain: int = 1) -> None:
        """first: the piece before anything was measured; None: as many tokens as answers run."""
        self.least, self.most, self.grain = least, most, grain
        self._piece = float(first) if first is not None else 0.0
        self._quiet: deque[float] = deque(maxlen=KEPT)
        self._rows = 0
        self._since = 0
        self._up = FIRST_UP
        self._late = 0
        self._rates: deque[float] = deque(maxlen=SURE)

    def room(self, rows: int) -> int:
        """Prompt tokens that may join ``rows`` running answers in the step that is made now; 0: one to be timed."""
        if self._piece == 0.0:
            self._piece = float(max(self.least, rows))
        if self._since >= AGAIN or (self._since >= SOON and self._far(rows)):
            self._since = 0
            return 0
        self._since += 1
        return self.size

    @property
    def size(self) -> int:
        """The piece as it is now, in tokens."""
        return max(self.least, int(self._piece) // self.grain * self.grain)

    def whole(self, budget: int) -> int:
        """Tokens, ``budget`` at most, of a step that prompts may fill: as many as take LONGEST, once that is known."""
        if not self._rates:
            return budget
        return min(budget, max(WHOLE, round(statistics.median_high(self._rates) * LONGEST)))

    def note_whole(self, tokens: int, seconds: float) -> None:
        """A step that prompts could fill took so long."""
        if tokens >= WHOLE and seconds > 0.0:
            self._rates.append(tokens / seconds)

    def note(self, rows: int, joined: int, seconds: float) -> None:
        """A step of ``rows`` answers and ``joined`` tokens of prompts took so long."""
        if rows == 0:
            return
        if joined == 0:
            if self._far(rows):
                self._quiet.clear()
            self._rows = rows
            self._since = 0
            self._quiet.append(seconds)
        elif self._quiet and not self._far(rows) and 2 * joined >= self.size:
            usual = statistics.median(self._quiet)
            if 2 * seconds < usual:
                # no step is faster for having a piece
                self._quiet.clear()
                self._since = AGAIN
                return
            late = seconds > MOST * usual
            self._late = self._late + 1 if late else 0
            if self._late >= SOON and len(self._quiet) < SURE:
                self._late, self._since = 0, AGAIN
            self._up = UP if late else self._up
            self._piece = min(max(self._piece * (DOWN if late else self._up), self.least), self.most)

    def _far(self, rows: int) -> bool:
        """Whether what was timed says little about so many answers."""
        return not (2 * self._rows <= 3 * rows and 2 * rows <= 3 * self._rows)


def mixed_tokens(weight_bytes: int, *, eight_bits: bool = False) -> int:
    """Tokens of a step that continues running answers while prompts join, on a GPU.

    As many as compute for 10 ms at 700 TFLOP/s (two operations a weight, two bytes a weight), so that launching such
    a step, which is no graph, hides behind the one in front; not more, so that whoever is reading waits little; and
    at least as many as let the products of a 7B model run at full speed. eight_bits: the inputs of most of them.
    """
    each = max(weight_bytes, 1)
    return max(MIXED_EIGHT if eight_bits else MIXED, round(0.010 * 700e12 / each / 128) * 128)
