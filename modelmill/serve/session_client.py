"""The server's side of saving and restoring sessions: one reply for each message."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from modelmill.core.errors import RequestError
from modelmill.core.types import Request
from modelmill.serve.worker_messages import Message, RestoreSession, SaveSession, SessionReply


class SessionClient:
    """Sessions that are being saved or restored by one worker."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[SessionReply]] = {}

    async def save(self, path: Path, prompt: Request, max_bytes: int) -> SessionReply:
        """Save the cached pages of a prompt.

        Args:
            path: of the file.
            prompt: the request that computed it.
            max_bytes: that the pages may take.

        Raises:
            RequestError: the worker refuses it.
            ModelmillError: the worker is lost.
        """
        number = next(self._numbers)
        images = [(each.position, each.length, each.digest) for each in prompt.embedding_spans]
        message = SaveSession(
            number, str(path), list(prompt.prompt), prompt.cache_salt, max_bytes, images
        )
        return await self._call(number, message)

    async def restore(self, path: Path, cache_salt: str) -> SessionReply:
        """Restore a saved session; raises as ``save``."""
        number = next(self._numbers)
        return await self._call(number, RestoreSession(number, str(path), cache_salt))

    def handle(self, reply: SessionReply) -> None:
        """Take a reply of the worker."""
        future = self._futures.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: BaseException) -> None:
        """End all with an error: the worker is lost."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)

    async def _call(self, number: int, message: Message) -> SessionReply:
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            reply = await future
        finally:
            del self._futures[number]
        if reply.error:
            raise RequestError(reply.error)
        return reply
