"""Server-sent events, and handling of clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from modelmill.serve import errors, openai_format
from modelmill.serve.request_handle import HttpRequestHandle, PromptOutputDelta

KEEPALIVE_SECONDS = 15.0
"""Seconds without events after which a comment keeps the connection alive in proxies."""
SEND_TIMEOUT = 60.0
"""Seconds that a client may take to accept one chunk."""
KEEPALIVE_COMMENT = b": alive\n\n"
MAX_BATCHED_ITEMS = 64
"""Stream items that are converted to events together."""
RunInThread = Callable[..., Awaitable[bytes]]
"""As ``Service.run_in_thread``."""
T = TypeVar("T", covariant=True)
R = TypeVar("R")


class EventFormatter(Protocol):
    """Converts stream items to events; every result may have several events, or none."""

    media_type: str = "text/event-stream"

    def first_events(self) -> bytes:
        """Events before any item."""

    def delta_events(self, items: Sequence[PromptOutputDelta]) -> bytes:
        """Events of new items."""

    def terminal_events(self) -> bytes:
        """Events after the last item."""

    def error_events(self, error: errors.ApiError) -> bytes:
        """Events of an error, in place of the rest."""
        return openai_format.sse_event(error.body())

    def keepalive(self) -> bytes:
        """What is sent while nothing arrives; clients ignore it."""
        return KEEPALIVE_COMMENT


class EventStream(Response):
    """An ASGI response of server-sent events; its handle is always closed at the end."""

    def __init__(
        self,
        handle: HttpRequestHandle,
        formatter: EventFormatter,
        run_in_thread: RunInThread | None = None,
    ) -> None:
        """Stream a request.

        Args:
            handle: of the request.
            formatter: makes the events.
            run_in_thread: runs the formatter on a thread, for large events; None: on the event
                loop.
        """
        super().__init__(media_type=formatter.media_type)
        self._handle = handle
        self._formatter = formatter
        self._run_in_thread = run_in_thread

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client disconnects or stalls."""
        try:
            with contextlib.suppress(ClientDisconnect):
                await run_while_connected(receive, self._send_events(send))
        finally:
            self._handle.close()

    async def _send_events(self, send: Send) -> None:
        headers = [
            (b"content-type", f"{self._formatter.media_type}; charset=utf-8".encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        handle, formatter = self._handle, self._formatter
        try:
            await _send_in_chunks(send, await self._call_formatter(formatter.first_events))
            sent_at = time.monotonic()
            while True:
                try:
                    items = await handle.fetch_items(KEEPALIVE_SECONDS)
                except TimeoutError:
                    await _send_in_chunks(send, formatter.keepalive())
                    sent_at = time.monotonic()
                    continue
                if not items:
                    break
                for begin in range(0, len(items), MAX_BATCHED_ITEMS):
                    data = await self._call_formatter(
                        formatter.delta_events, items[begin : begin + MAX_BATCHED_ITEMS]
                    )
                    # text may make no events for long: thinking that is left out, a held call
                    if not data and time.monotonic() - sent_at >= KEEPALIVE_SECONDS:
                        data = formatter.keepalive()
                    if data:
                        await _send_in_chunks(send, data)
                        sent_at = time.monotonic()
                    if begin:
                        await asyncio.sleep(0)  # a slow client gets many events at once
            await _send_in_chunks(send, await self._call_formatter(formatter.terminal_events))
        except ClientStalled:
            return
        except Exception as error:
            api_error = errors.to_api_error(error)
            await _send_in_chunks(
                send, await self._call_formatter(formatter.error_events, api_error)
            )
            if api_error.status == 500:
                raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _call_formatter(self, make: Callable[..., bytes], *args: Any) -> bytes:
        return (
            make(*args) if self._run_in_thread is None else await self._run_in_thread(make, *args)
        )


class PendingResult(Protocol[T]):
    """What a response that is not streamed waits for."""

    async def wait_until_finished(self) -> T:
        """Wait until all outputs have finished.

        Raises:
            ModelmillError: the request failed.
        """

    def close(self) -> None:
        """Abort what has not finished."""


async def wait_or_disconnect(request: Request, pending: PendingResult[T]) -> T:
    """Wait for all outputs.

    Raises:
        ModelmillError: the request failed.
        ClientDisconnect: the client has disconnected.
    """
    try:
        return await run_while_connected(request.receive, pending.wait_until_finished())
    finally:
        pending.close()


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, R]) -> R:
    """Return the result of ``work``; cancel it, and wait for its end, if the client disconnects.

    Raises:
        ClientDisconnect: the client has disconnected.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class ClientStalled(Exception):
    """The client does not read its response."""


async def send_with_timeout(send: Send, message: Message) -> None:
    """Send a message.

    Raises:
        ClientStalled: the client did not accept it within SEND_TIMEOUT seconds.
    """
    try:
        async with asyncio.timeout(SEND_TIMEOUT):
            await send(message)
    except TimeoutError:
        raise ClientStalled from None


async def _wait_disconnect(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_in_chunks(send: Send, data: bytes) -> None:
    for begin in range(0, len(data), openai_format.SEND_CHUNK_BYTES):
        chunk = data[begin : begin + openai_format.SEND_CHUNK_BYTES]
        await send_with_timeout(
            send, {"type": "http.response.body", "body": chunk, "more_body": True}
        )
        if begin:
            await asyncio.sleep(0)
