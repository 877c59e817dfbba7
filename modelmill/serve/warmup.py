"""Runs the slow one-time work of a new process before the first client request.

Routes are called with internal requests that bypass the middleware: they appear in no log, counter
or step.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message

from modelmill.serve.service import INTERNAL_SCOPE_KEY

_MESSAGES = [{"role": "user", "content": "x"}]


async def warm_up_routes(app: ASGIApp, paths: Sequence[str]) -> None:
    """Load imports, validators and middleware, and format an error."""
    await _send_internal_request(app, "GET", "/health")
    await _send_internal_request(app, "GET", "/metrics")
    for path in paths:
        await _send_internal_request(app, "POST", path, {})
        await _send_internal_request(app, "POST", path, {"model": 1})


async def warm_up_text_processing(app: ASGIApp, name: str) -> None:
    """Load an engine's tokenizer and the process of its chat template.

    An engine without them returns an error, which is ignored.
    """
    await _send_internal_request(app, "POST", "/tokenize", {"model": name, "prompt": "x"})
    await _send_internal_request(app, "POST", "/tokenize", {"model": name, "messages": _MESSAGES})


async def warm_up_openapi(app: ASGIApp) -> None:
    """Make the OpenAPI document, on a thread."""
    await _send_internal_request(app, "GET", "/openapi.json")


def freeze_gc() -> None:
    """Exclude the objects that exist now from garbage collection.

    They live as long as the process, and scanning them takes 100 ms and more.
    """
    gc.collect()
    gc.freeze()


async def _send_internal_request(app: ASGIApp, method: str, path: str, body: Any = None) -> None:
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
            INTERNAL_SCOPE_KEY: True, "headers": [(b"host", b"localhost"),
            (b"content-type", b"application/json")],
            "server": ("localhost", 80), "client": ("127.0.0.1", 1),
        },
        receive,
        send,
    )  # fmt: skip
