"""Notices a worker that hangs: stopped, dead-locked, or in a step that never ends.

A worker's main thread tells that it lives: it answers a ``Ping`` between two steps or while it has nothing to do, and
in the middle of a long step on a CPU it sends a ``Heartbeat`` of its own after an operation of the model. So a step may
take as long as it needs, and one operation of it as long as the limit. While an engine is opened (read, built,
compiled, warmed up), where minutes without a word are right, the thread that reads the socket answers for the process.

Silence is counted in turns of the API's own event loop. So an API that was stopped or busy itself counts none of that
time, and reads what came meanwhile before it counts on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator

LIMIT = 120.0
"""Seconds without a sign of life after which a worker hangs, by default."""
FIRST = 300.0
"""Seconds that a process may at least take to its first sign of life: libraries are read from the disk before it."""
MOST_TURN = 5.0
TURNS = 8
"""In which the limit is divided, at least."""


def turn(limit: float) -> float:
    """Seconds between two signs of life of a worker that is well."""
    return min(limit / TURNS, MOST_TURN)


class Watchdog:
    """Counts how long nothing has been heard of one worker."""

    def __init__(
        self, limit: float, ping: Callable[[], None], sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        """limit: seconds; 0: a worker never hangs. ping: asks it for a sign of life."""
        self.limit = limit
        self._ping, self._sleep = ping, sleep
        self._silent = 0
        self._heard = self._asked = False
        self._listening = True

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """Nobody listens inside: what is said meanwhile is heard later, and no turn is silent."""
        self._listening = False
        yield
        self._listening = True

    def heard(self) -> None:
        """The worker has said something."""
        self._silent, self._heard, self._asked = 0, True, False

    async def hung(self) -> float:
        """Until the worker hangs: for ever where it does not, or may not. Returns the seconds it was given."""
        if not self.limit:
            await asyncio.Event().wait()
        pause = turn(self.limit)
        while self._silent < self._most(pause):
            if not self._asked:
                self._asked = True
                self._ping()
            await self._sleep(pause)
            self._silent += self._listening
        return self._given

    @property
    def _given(self) -> float:
        return self.limit if self._heard else max(self.limit, FIRST)

    def _most(self, pause: float) -> int:
        """Turns of silence that are too many. One more than the limit: a ping may have gone out at a turn's end."""
        return math.ceil(self._given / pause) + 1
