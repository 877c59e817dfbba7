"""Server-sent events, and what a client that leaves means."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from modelmill.serve import errors, openai_format
from modelmill.serve.request_handle import RequestHandle, StreamItem

KEEPALIVE_SECONDS = 15.0
"""Seconds without news after which a comment tells proxies that the connection lives."""
SEND_TIMEOUT = 60.0
"""Seconds that a client may take to accept one piece."""
KEEPALIVE_COMMENT = b": alive\n\n"
MAX_BATCHED_ITEMS = 64
"""Pieces of news that become events at once."""
RunInThread = Callable[..., Awaitable[bytes]]
"""As ``Service.run_in_thread``."""
T = TypeVar("T", covariant=True)
R = TypeVar("R")


class EventFormatter(Protocol):
    """How news become events; every piece may hold several events, or none."""

    def first_events(self) -> bytes:
        """Before any news."""

    def delta_events(self, items: Sequence[StreamItem]) -> bytes:
        """Of what has come."""

    def last_events(self) -> bytes:
        """After the last news."""

    def error_events(self, error: errors.ApiError) -> bytes:
        """In place of what is left."""
        return openai_format.sse_event(error.body())


class EventStream(Response):
    """An ASGI response of server-sent events. Its handle is closed however it ends."""

    def __init__(
        self,
        handle: RequestHandle,
        formatter: EventFormatter,
        run_in_thread: RunInThread | None = None,
    ) -> None:
        """run_in_thread: runs what makes events on a thread, where they may be large; None: on the
        loop.
        """
        super().__init__(media_type="text/event-stream")
        self._handle, self._formatter, self._run_in_thread = handle, formatter, run_in_thread

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client is gone or takes nothing."""
        pump, gone = (
            asyncio.create_task(self._send_events(send)),
            asyncio.create_task(_wait_disconnect(receive)),
        )
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            self._handle.close()
            for task in (pump, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _send_events(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        ticket, feed = self._handle, self._formatter
        try:
            await _write(send, await self._make_events(feed.first_events))
            while True:
                try:
                    news = await ticket.fetch(KEEPALIVE_SECONDS)
                except TimeoutError:
                    await _write(send, KEEPALIVE_COMMENT)
                    continue
                if not news:
                    break
                for begin in range(0, len(news), MAX_BATCHED_ITEMS):
                    await _write(
                        send,
                        await self._make_events(
                            feed.delta_events, news[begin : begin + MAX_BATCHED_ITEMS]
                        ),
                    )
                    if begin:
                        await asyncio.sleep(0)  # a client that was slow gets much at once
            await _write(send, await self._make_events(feed.last_events))
        except ClientStalled:
            return
        except Exception as error:
            answer = errors.to_api_error(error)
            await _write(send, await self._make_events(feed.error_events, answer))
            if answer.status == 500:
                raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _make_events(self, make: Callable[..., bytes], *args: Any) -> bytes:
        return (
            make(*args) if self._run_in_thread is None else await self._run_in_thread(make, *args)
        )


class PendingResponse(Protocol[T]):
    """What an answer that is sent whole waits for."""

    async def finish(self) -> T:
        """Wait until everything has ended. Raises what went wrong."""

    def close(self) -> None:
        """Give up what has not ended."""


async def wait_or_disconnect(request: Request, pending: PendingResponse[T]) -> T:
    """Wait for all answers.

    Raises what went wrong, ClientDisconnect where nobody waits for them any more.
    """
    done, gone = (
        asyncio.create_task(pending.finish()),
        asyncio.create_task(_wait_disconnect(request.receive)),
    )
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        pending.close()
        done.cancel()
        gone.cancel()


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, R]) -> R:
    """What ``work`` returns.

    It is cancelled, and ClientDisconnect raised, where its client leaves.
    """
    doing, gone = asyncio.create_task(work), asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        doing.cancel()
        gone.cancel()


class ClientStalled(Exception):
    """The client takes nothing."""


async def send_with_timeout(send: Send, message: Message) -> None:
    """Send a message. Raises Stalled where the client takes nothing for so long."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT):
            await send(message)
    except TimeoutError:
        raise ClientStalled from None


async def _wait_disconnect(receive: Receive) -> None:
    """Until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _write(send: Send, piece: bytes) -> None:
    for begin in range(0, len(piece), openai_format.SEND_CHUNK_BYTES):
        part = piece[begin : begin + openai_format.SEND_CHUNK_BYTES]
        await send_with_timeout(
            send, {"type": "http.response.body", "body": part, "more_body": True}
        )
        if begin:
            await asyncio.sleep(0)
