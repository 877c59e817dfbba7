"""The server's side of an engine that sleeps and wakes up: one reply for each message."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from modelmill.core.errors import CapacityError
from modelmill.serve.worker_messages import Message, SleepEngine, SleepReply, WakeEngine


class SleepClient:
    """Messages to one worker."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[SleepReply]] = {}

    async def sleep(self) -> SleepReply:
        """Let the worker give its memory back.

        Raises:
            CapacityError: it cannot; the engine goes on.
            ModelmillError: the worker is lost.
        """
        number = next(self._numbers)
        return await self._call(number, SleepEngine(number))

    async def wake_up(self) -> SleepReply:
        """Let the worker take its memory again.

        Raises:
            CapacityError: it cannot; the engine still sleeps.
            ModelmillError: the worker is lost.
        """
        number = next(self._numbers)
        return await self._call(number, WakeEngine(number))

    def handle(self, reply: SleepReply) -> None:
        """Take a reply of the worker."""
        future = self._futures.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: BaseException) -> None:
        """End all with an error: the worker is lost."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)

    async def _call(self, number: int, message: Message) -> SleepReply:
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            reply = await future
        finally:
            del self._futures[number]
        if reply.error:
            raise CapacityError(reply.error)
        return reply
