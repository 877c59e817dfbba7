"""Notices a worker that hangs: stopped, dead-locked, or in a step that never ends.

A worker's main thread tells that it lives: it answers a ``Ping`` between two steps or while it has
nothing to do, and in the middle of a long step on a CPU it sends a ``Heartbeat`` of its own after
an operation of the model. So a step may take as long as it needs, and one operation of it as long
as the limit. While an engine is opened (read, built, compiled, warmed up), where minutes without a
word are right, the thread that reads the socket answers for the process.

Silence is counted in turns of the API's own event loop. So an API that was stopped or busy itself
counts none of that time, and reads what came meanwhile before it counts on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator

DEFAULT_TIMEOUT = 120.0
"""Seconds without a sign of life after which a worker hangs, by default."""
STARTUP_TIMEOUT = 300.0
"""Seconds that a process may at least take to its first sign of life: libraries are read from the
disk before it.
"""
MAX_POLL_SECONDS = 5.0
MIN_POLLS_PER_TIMEOUT = 8
"""In which the limit is divided, at least."""


def poll_interval(timeout: float) -> float:
    """Seconds between two signs of life of a worker that is well."""
    return min(timeout / MIN_POLLS_PER_TIMEOUT, MAX_POLL_SECONDS)


class Watchdog:
    """Counts how long nothing has been heard of one worker."""

    def __init__(
        self,
        timeout: float,
        ping: Callable[[], None],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """timeout: seconds; 0: a worker never hangs. ping: asks it for a sign of life."""
        self.timeout = timeout
        self._ping, self._sleep = ping, sleep
        self._silent_polls = 0
        self._received_any = self._ping_sent = False
        self._listening = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody listens inside: what is said meanwhile is heard later, and no turn is silent."""
        self._listening = False
        yield
        self._listening = True

    def on_message(self) -> None:
        """The worker has said something."""
        self._silent_polls, self._received_any, self._ping_sent = 0, True, False

    async def wait_until_hung(self) -> float:
        """Until the worker hangs: for ever where it does not, or may not.

        Returns the seconds it was given.
        """
        if not self.timeout:
            await asyncio.Event().wait()
        pause = poll_interval(self.timeout)
        while self._silent_polls < self._max_silent_polls(pause):
            if not self._ping_sent:
                self._ping_sent = True
                self._ping()
            await self._sleep(pause)
            self._silent_polls += self._listening
        return self._current_timeout

    @property
    def _current_timeout(self) -> float:
        return self.timeout if self._received_any else max(self.timeout, STARTUP_TIMEOUT)

    def _max_silent_polls(self, interval: float) -> int:
        """Turns of silence that are too many.

        One more than the limit: a ping may have gone out at a turn's end.
        """
        return math.ceil(self._current_timeout / interval) + 1
