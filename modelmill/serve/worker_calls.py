"""Messages to a worker that it answers with one reply each, matched by a number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from modelmill.core.errors import ModelmillError
from modelmill.serve.worker_messages import Message


class NumberedReply(Protocol):
    """A reply of a worker.

    Attributes:
        number: of the message that it answers.
        error: why the worker refuses it, or "".
    """

    @property
    def number(self) -> int:
        """See above."""

    @property
    def error(self) -> str:
        """See above."""


Reply = TypeVar("Reply", bound=NumberedReply)


class WorkerCalls(Generic[Reply]):
    """Calls of one worker that wait for their replies."""

    def __init__(
        self, send: Callable[[Message], None], refusal: Callable[[str], ModelmillError]
    ) -> None:
        """refusal: makes the error that a call raises from that of the reply."""
        self._send, self._refusal = send, refusal
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[Reply]] = {}

    async def call(self, make_message: Callable[[int], Message]) -> Reply:
        """Send a message and wait for its reply.

        Args:
            make_message: from the message's number.

        Raises:
            ModelmillError: the worker refuses it, or is lost.
        """
        number = next(self._numbers)
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(make_message(number))
            reply = await future
        finally:
            del self._futures[number]
        if reply.error:
            raise self._refusal(reply.error)
        return reply

    def handle_message(self, reply: Reply) -> None:
        """Take a reply of the worker."""
        future = self._futures.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: BaseException) -> None:
        """End all with an error: the worker is lost."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
