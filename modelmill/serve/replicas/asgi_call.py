"""Calls an ASGI application without a socket: a request in, a response in chunks out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp

from modelmill.serve.service import TENANT_SCOPE_KEY

MAX_QUEUED_CHUNKS = 256
"""Chunks of a response that may wait to be fetched."""


class AsgiCall:
    """A running call of an application; needs an event loop.

    Attributes:
        messages: What the application sends; None behind the last.
        disconnected: Set it to have the effect of a client that disconnects.
        task: Runs the application.
    """

    def __init__(
        self, app: ASGIApp, scope: dict[str, Any], body: bytes, max_queued: int = 0
    ) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue(max_queued)
        self.disconnected = asyncio.Event()
        self._body: bytes | None = body
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self.messages.put)
        finally:
            await self.messages.put(None)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def cancel(self) -> None:
        """End the application; what it has sent is dropped."""
        self.disconnected.set()
        self.task.cancel()
        while not self.messages.empty():  # a full queue has no place for its end
            self.messages.get_nowait()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.task


async def call_asgi_app(app: ASGIApp, head: dict[str, Any], body: bytes) -> AsyncGenerator[Any]:
    """Call an application; yield (status, headers), then bytes.

    Closing the generator has the effect of a client that disconnects.
    """
    call = AsgiCall(app, _make_scope(head), body, MAX_QUEUED_CHUNKS)
    out = call.messages
    try:
        while (message := await out.get()) is not None:
            if message["type"] == "http.response.start":
                yield message["status"], list(message.get("headers", ()))
                continue
            chunks = [message.get("body", b"")]
            # join the chunks that are already available
            while not out.empty() and (message := out.get_nowait()) is not None:
                chunks.append(message.get("body", b""))
            if any(chunks):
                yield b"".join(chunks)
            if message is None:
                break
        await call.task
    finally:
        await call.cancel()


def _make_scope(head: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": head["method"],
        "scheme": "http",
        "path": head["path"],
        "raw_path": head["raw_path"],
        "root_path": "",
        "query_string": head["query"],
        "headers": [(b"host", b"localhost"), *head["headers"]],
        "server": ("localhost", 80),
        "client": None,
        "state": {},
        TENANT_SCOPE_KEY: head.get("tenant", ""),
    }
