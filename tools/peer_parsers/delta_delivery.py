"""How a test receives deltas: the peers' interfaces differ in it, not in the calls.

Two things are no property of the calls: where a streamed answer ends, for which most of the
peers' interfaces have no call; and how a call is cut into deltas. A test is run until it passes in
one of the ways, and counts as failed if it passes in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto


class DeltaCut(Enum):
    """How a call is cut into deltas."""

    AS_READ = auto()
    """The name with the first arguments, then arguments as they are read."""
    NAME_FIRST = auto()
    """The name alone, then arguments."""
    WHOLE_CALL = auto()
    """A call once it is complete."""


@dataclass
class DeltaDelivery:
    """The way of the current run, and the streamed answers of the current test.

    A first run counts the pieces of each streamed answer; another one can then end an answer with
    its last piece.

    Attributes:
        cut: how a call is cut.
        ends: whether the last piece of an answer ends it.
    """

    cut: DeltaCut = DeltaCut.AS_READ
    ends: bool = False

    def __post_init__(self) -> None:
        self._known: list[int] = []
        self._counts: list[int] = []

    def ways(self) -> Iterator[None]:
        """Yield once for each way, in which a test then runs."""
        self._counts = []
        for cut in DeltaCut:
            for ends in (False, True):
                self.cut, self.ends = cut, ends
                self._known, self._counts = self._counts, []
                yield

    def begin_answer(self) -> int:
        """Return the number of a new answer."""
        self._counts.append(0)
        return len(self._counts) - 1

    def add_piece(self, answer: int) -> bool:
        """Count a piece; returns whether it ends the answer."""
        self._counts[answer] += 1
        known = self._known
        return self.ends and answer < len(known) and known[answer] == self._counts[answer]


DELIVERY = DeltaDelivery()
