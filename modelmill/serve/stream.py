"""Server-sent events, and what a client that leaves means."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from modelmill.serve import errors, shape
from modelmill.serve.ticket import News, Ticket

QUIET = 15.0
"""Seconds without news after which a comment tells proxies that the connection lives."""
STALL = 60.0
"""Seconds that a client may take to accept one piece."""
ALIVE = b": alive\n\n"
T = TypeVar("T", covariant=True)


class Feed(Protocol):
    """How news become events; every piece may hold several events, or none."""

    def first(self) -> bytes:
        """Before any news."""

    def more(self, news: Sequence[News]) -> bytes:
        """Of what has come."""

    def last(self) -> bytes:
        """After the last news."""

    def failed(self, error: errors.ApiError) -> bytes:
        """In place of what is left."""
        return shape.event(error.body())


class EventStream(Response):
    """An ASGI response of server-sent events. Its ticket is closed however it ends."""

    def __init__(self, ticket: Ticket, feed: Feed) -> None:
        super().__init__(media_type="text/event-stream")
        self._ticket, self._feed = ticket, feed

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client is gone or takes nothing."""
        pump, gone = asyncio.create_task(self._pump(send)), asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            self._ticket.close()
            for task in (pump, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _pump(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        ticket, feed = self._ticket, self._feed
        try:
            await _write(send, feed.first())
            while True:
                try:
                    news = await ticket.fetch(QUIET)
                except TimeoutError:
                    await _write(send, ALIVE)
                    continue
                if not news:
                    break
                await _write(send, feed.more(news))
            await _write(send, feed.last())
        except Stalled:
            return
        except Exception as error:
            answer = errors.of(error)
            await _write(send, feed.failed(answer))
            if answer.status == 500:
                raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Awaited(Protocol[T]):
    """What an answer that is sent whole waits for."""

    async def finish(self) -> T:
        """Wait until everything has ended. Raises what went wrong."""

    def close(self) -> None:
        """Give up what has not ended."""


async def finished(request: Request, ticket: Awaited[T]) -> T:
    """Wait for all answers. Raises what went wrong, ClientDisconnect where nobody waits for them any more."""
    done, gone = asyncio.create_task(ticket.finish()), asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        ticket.close()
        done.cancel()
        gone.cancel()


class Stalled(Exception):
    """The client takes nothing."""


async def accepted(send: Send, message: Message) -> None:
    """Send a message. Raises Stalled where the client takes nothing for so long."""
    try:
        async with asyncio.timeout(STALL):
            await send(message)
    except TimeoutError:
        raise Stalled from None


async def _gone(receive: Receive) -> None:
    """Until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _write(send: Send, piece: bytes) -> None:
    if piece:
        await accepted(send, {"type": "http.response.body", "body": piece, "more_body": True})
