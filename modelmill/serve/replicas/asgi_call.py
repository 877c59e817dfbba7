"""An application called without a socket: what a client sent goes in, what it answers comes out in
pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp

from modelmill.serve.service import TENANT_KEY

MAX_QUEUED_CHUNKS = 256
"""Pieces of a response that may wait to be fetched."""


async def call_app(app: ASGIApp, head: dict[str, Any], body: bytes) -> AsyncGenerator[Any]:
    """(status, headers), then bytes: what an application answers.

    Closing it is the client's leaving.
    """
    gone, given = asyncio.Event(), False
    out: asyncio.Queue[Any] = asyncio.Queue(MAX_QUEUED_CHUNKS)

    async def receive() -> dict[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
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
            pieces = [message.get("body", b"")]
            # what has come meanwhile goes along
            while not out.empty() and (message := out.get_nowait()) is not None:
                pieces.append(message.get("body", b""))
            if any(pieces):
                yield b"".join(pieces)
            if message is None:
                break
        await task
    finally:
        gone.set()
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
