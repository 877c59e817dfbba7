"""What the first requests of a process would wait for, and hold others up with: done before anybody
asks.

Routes are tried with requests of our own, which pass no middleware: no log, counter or step knows
of them.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message

from modelmill.serve.service import INTERNAL_KEY

_MESSAGES = [{"role": "user", "content": "x"}]


async def warm_up_routes(app: ASGIApp, paths: Sequence[str]) -> None:
    """Imports, validators, the application's own layers, and how an error is told."""
    await _call(app, "GET", "/health")
    await _call(app, "GET", "/metrics")
    for path in paths:
        await _call(app, "POST", path, {})
        await _call(app, "POST", path, {"model": 1})


async def warm_up_engine(app: ASGIApp, name: str) -> None:
    """Its tokenizer and the process of its chat template; an engine that has none refuses, which is
    as well.
    """
    await _call(app, "POST", "/tokenize", {"model": name, "prompt": "x"})
    await _call(app, "POST", "/tokenize", {"model": name, "messages": _MESSAGES})


async def warm_up_openapi(app: ASGIApp) -> None:
    """The OpenAPI document, which a thread makes meanwhile."""
    await _call(app, "GET", "/openapi.json")


def freeze_gc() -> None:
    """What lives as long as the process is not looked at again and again for garbage: that takes
    100 ms and more.
    """
    gc.collect()
    gc.freeze()


async def _call(app: ASGIApp, method: str, path: str, body: Any = None) -> None:
    data = b"" if body is None else json.dumps(body).encode()

    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(_: Message) -> None:
        pass

    await app(
        {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "state": {},
            INTERNAL_KEY: True, "headers": [(b"host", b"localhost"),
            (b"content-type", b"application/json")],
            "server": ("localhost", 80), "client": ("127.0.0.1", 1),
        },
        receive,
        send,
    )  # fmt: skip
