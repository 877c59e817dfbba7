"""A client that calls an ASGI application without a socket, and can leave in the middle."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from modelmill.serve.replicas.asgi_call import AsgiCall


@dataclass
class Response:
    """status, headers (lower case) and body of an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error_message(self) -> str:
        """The message of an error in any dialect."""
        error = self.json["error"]
        message: str = error if isinstance(error, str) else error["message"]
        return message

    @property
    def events(self) -> list[Any]:
        """The events of a stream, which must be correct to the byte; the last is "[DONE]" where it
        is there.
        """
        return events_of(self.body)


def events_of(body: bytes) -> list[Any]:
    events: list[Any] = []
    assert body.endswith(b"\n\n"), body[-40:]
    for block in body[:-2].split(b"\n\n"):
        if block.startswith(b":"):
            continue
        assert block.startswith(b"data: "), block
        assert b"\n" not in block, block
        text = block[6:].decode()
        events.append(text if text == "[DONE]" else json.loads(text))
    return events


class Client:
    """Calls of one application."""

    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        self.app, self.key = app, key

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> Response:
        """One request, to its end. body: bytes, or what becomes JSON."""
        response = Response()
        async for part_type, value in self.parts(method, path, body, **options):
            if part_type == "start":
                response.status, response.headers = value
            else:
                response.body += value
        return response

    async def get(self, path: str, **options: Any) -> Response:
        return await self.call("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Response:
        return await self.call("POST", path, body, **options)

    async def parts(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        raw: str | None = None,
    ) -> AsyncIterator[tuple[str, Any]]:
        """("start", (status, headers)), then ("body", bytes) as they are sent.

        Closing it is leaving.
        """
        path, _, query = path.partition("?")
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        sent = {
            "host": "localhost",
            "content-type": "application/json",
            "content-length": str(len(data)),
        }
        if self.key is not None:
            sent["authorization"] = f"Bearer {self.key}"
        sent |= headers or {}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": (raw or path).encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 1),
            "state": {},
        }
        call = AsgiCall(self.app, scope, data)
        try:
            while (message := await call.messages.get()) is not None:
                if message["type"] == "http.response.start":
                    response_headers = {
                        name.decode(): value.decode() for name, value in message["headers"]
                    }
                    yield "start", (message["status"], response_headers)
                else:
                    yield "body", message.get("body", b"")
        finally:
            call.disconnected.set()
            await call.task
