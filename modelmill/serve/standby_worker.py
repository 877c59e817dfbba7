"""Keeps a worker process ready that has imported everything, so that a model loads sooner."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from modelmill.core import log
from modelmill.serve.worker_process import WorkerLauncher, WorkerProcess, launch_worker

STANDBY_REFILL_DELAY_SECONDS = 3.0
"""Seconds after a launch until the next process is started: imports take seconds of a core, which
the model that is being loaded needs first.
"""
_log = log.get_logger("serve")


class StandbyLauncher:
    """Launches workers from a stock of one process that waits for its ``OpenEngine``."""

    def __init__(
        self, launch: WorkerLauncher = launch_worker, delay: float = STANDBY_REFILL_DELAY_SECONDS
    ) -> None:
        """Start without a process; ``refill`` starts it.

        Args:
            launch: starts a process.
            delay: seconds from a launch to the next ``refill``.
        """
        self._launch, self._delay = launch, delay
        self._standby: tuple[socket.socket, WorkerProcess] | None = None
        self._ended: asyncio.Task[int] | None = None
        self._refill: asyncio.Task[None] | None = None
        self._closing = False

    async def __call__(self) -> tuple[socket.socket, WorkerProcess]:
        """Return the waiting process, or a new one if there is none."""
        standby = self._take_standby()
        self._schedule_refill()
        return standby or await self._launch()

    async def refill(self) -> None:
        """Start a process that waits, unless there is one."""
        if self._standby is not None or self._closing:
            return
        try:
            self._standby = await self._launch()
        except OSError as error:
            _log.warning("no standby worker", extra={"data": {"reason": error.strerror}})
            return
        self._ended = asyncio.create_task(self._standby[1].wait())

    async def close(self) -> None:
        """End the waiting process; none is started any more."""
        self._closing = True
        if self._refill is not None:
            self._refill.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refill
        if self._standby is not None:
            sock, process = self._standby
            self._standby = None
            process.kill()
            sock.close()
            if self._ended is not None:
                await self._ended

    def _take_standby(self) -> tuple[socket.socket, WorkerProcess] | None:
        standby, self._standby = self._standby, None
        if standby is None or self._ended is None:
            return None
        if self._ended.done():  # it was killed while it waited
            standby[0].close()
            return None
        self._ended.cancel()
        return standby

    def _schedule_refill(self) -> None:
        if self._closing or (self._refill is not None and not self._refill.done()):
            return
        self._refill = asyncio.create_task(self._refill_later())

    async def _refill_later(self) -> None:
        await asyncio.sleep(self._delay)
        await self.refill()
