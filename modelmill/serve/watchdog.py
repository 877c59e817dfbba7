"""Detects a worker that hangs: stopped, deadlocked, or in a step that never ends.

The worker's main thread shows that it is alive: it answers a ``Ping`` between two steps or while
idle, and during a long step on a CPU it sends a ``Heartbeat`` after an op of the model. So a step
may take as long as it needs, and one op as long as the timeout. While an engine is opened (read,
built, compiled, warmed up), which may take minutes, or goes to sleep or wakes up, the worker's
reader thread answers.

Silence is counted in polls of the API's own event loop. An API process that was itself stopped or
busy counts none of that time, and reads pending messages before it counts on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator

DEFAULT_TIMEOUT = 120.0
"""Seconds without a sign of life after which a worker counts as hung, by default."""
MIN_FIRST_HEARTBEAT_TIMEOUT = 300.0
"""Smallest timeout for the first sign of life of a process: it loads libraries from the disk first.
"""
MAX_POLL_SECONDS = 5.0
MIN_POLLS_PER_TIMEOUT = 8
"""The timeout is divided into at least so many polls."""


def poll_interval(timeout: float) -> float:
    """Seconds between two signs of life of a healthy worker."""
    return min(timeout / MIN_POLLS_PER_TIMEOUT, MAX_POLL_SECONDS)


class Watchdog:
    """Counts how long one worker has been silent."""

    def __init__(
        self,
        timeout: float,
        ping: Callable[[], None],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Start with a silent worker.

        Args:
            timeout: seconds; 0: a worker never counts as hung.
            ping: sends a Ping to the worker.
            sleep: waits for so many seconds.
        """
        self.timeout = timeout
        self._ping, self._sleep = ping, sleep
        self._silent_polls = 0
        self._received_any = self._ping_sent = False
        self._listening = True

    @contextlib.contextmanager
    def ignoring_silence(self) -> Iterator[None]:
        """Do not count silent polls inside: the API process reads no messages meanwhile."""
        self._listening = False
        yield
        self._listening = True

    def on_message(self) -> None:
        """Record that the worker sent a message."""
        self._silent_polls = 0
        self._received_any = True
        self._ping_sent = False

    async def wait_until_hung(self) -> float:
        """Wait until the worker hangs, forever if it does not or if ``timeout`` is 0.

        Returns:
            The timeout that was exceeded, in seconds.
        """
        if not self.timeout:
            await asyncio.Event().wait()
        interval = poll_interval(self.timeout)
        while self._silent_polls < self._max_silent_polls(interval):
            if not self._ping_sent:
                self._ping_sent = True
                self._ping()
            await self._sleep(interval)
            self._silent_polls += self._listening
        return self._current_timeout

    @property
    def _current_timeout(self) -> float:
        return (
            self.timeout if self._received_any else max(self.timeout, MIN_FIRST_HEARTBEAT_TIMEOUT)
        )

    def _max_silent_polls(self, interval: float) -> int:
        """Number of silent polls that count as hung.

        One more than the timeout, because a ping may have been sent at the end of a poll.
        """
        return math.ceil(self._current_timeout / interval) + 1
