"""The server's side of an engine that sleeps and wakes up."""

from __future__ import annotations

from collections.abc import Callable

from modelmill.core.errors import CapacityError
from modelmill.serve.worker_calls import WorkerCalls
from modelmill.serve.worker_messages import Message, SleepEngine, SleepOrWakeReply, WakeEngine


class SleepClient(WorkerCalls[SleepOrWakeReply]):
    """Messages to one worker."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__(send, CapacityError)

    async def sleep(self) -> SleepOrWakeReply:
        """Let the worker give its memory back.

        Raises:
            CapacityError: it cannot; the engine goes on.
            ModelmillError: the worker is lost.
        """
        return await self.call(SleepEngine)

    async def wake_up(self) -> SleepOrWakeReply:
        """Let the worker take its memory again.

        Raises:
            CapacityError: it cannot; the engine still sleeps.
            ModelmillError: the worker is lost.
        """
        return await self.call(WakeEngine)
