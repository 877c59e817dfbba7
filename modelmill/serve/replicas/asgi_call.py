"""Calls an ASGI application without a socket: a request in, a response in chunks out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp

from modelmill.serve.service import TENANT_KEY

MAX_QUEUED_CHUNKS = 256
"""Chunks of a response that may wait to be fetched."""


async def call_app(app: ASGIApp, head: dict[str, Any], body: bytes) -> AsyncGenerator[Any]:
    """Call an application; yield (status, headers), then bytes.

    Closing the generator has the effect of a client that disconnects.
    """
    disconnected, body_sent = asyncio.Event(), False
    out: asyncio.Queue[Any] = asyncio.Queue(MAX_QUEUED_CHUNKS)

    async def receive() -> dict[str, Any]:
        nonlocal body_sent
        if not body_sent:
            body_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(head), receive, out.put)
        finally:
            await out.put(None)

    task = asyncio.create_task(run())
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
        await task
    finally:
        disconnected.set()
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _scope(head: dict[str, Any]) -> dict[str, Any]:
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
        TENANT_KEY: head.get("tenant", ""),
    }
