"""What every request passes first: its id, the key, the size of its body, the log. Plain ASGI, outermost.

Everything but /health and the page's files needs a key where there are keys, whatever the path looks like: the check
is made here, on the path as it came, before any routing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelmill.core import log
from modelmill.serve.errors import ApiError
from modelmill.serve.http import HEADER_BYTES
from modelmill.serve.routes.page import PATHS
from modelmill.serve.service import Service
from modelmill.serve.ticket import Ticket
from modelmill.serve.traces import Traces, Visited

OPEN = (b"/health", *PATHS)
WHILE_DRAINING = (b"/health", b"/metrics", b"/version")
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_log = log.get("serve.access")


class Gate:
    """Stands before the app."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = [hashlib.sha256(key.encode()).digest() for key in service.limits.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it here."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
                return
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        service = self._service
        visit = _Visit(scope, headers, send, service.traces)
        service.active += 1
        try:
            self._check(scope, headers)
            visit.body = _Body(receive, service.limits.body, service.limits.patience)
            await self._app(scope, visit.body, visit.send)
            if visit.body.error is not None:
                raise visit.body.error
        except ApiError as error:
            await visit.refuse(error)
        finally:
            service.active -= 1
            visit.end()

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raises ApiError for who may not enter."""
        path = scope.get("raw_path") or scope["path"].encode()
        service = self._service
        if not self._keys:
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
        elif path not in OPEN and not self._known(headers):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                "authentication_error",
                None,
                "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )
        if service.draining and path not in WHILE_DRAINING:
            raise ApiError(
                503, "the server is shutting down", "service_unavailable_error", None, "draining", {"Retry-After": "5"}
            )
        if _size(scope, path) > HEADER_BYTES:
            raise ApiError(431, f"the header is larger than {HEADER_BYTES} bytes", code="header_too_large")
        length = headers.get(b"content-length", b"0")
        # Python reads no number of more than 4,300 digits
        if not length.isdigit() or len(length) > 18 or int(length) > service.limits.body:
            raise too_large(service.limits.body)

    def _known(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        # every key is compared, so that the time tells nothing
        found = [hmac.compare_digest(given, each) for each in self._keys]
        return scheme.lower() == b"bearer" and any(found)

    def _check_host(self, host: str) -> None:
        """Without a key, a page of the web must not reach us under a name of its own (DNS rebinding)."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower().rstrip(".")
        if name in ("", "localhost", *self._service.limits.hosts):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise ApiError(
                403, "this server has no key and answers to localhost only; start it with --api-key", "permission_error"
            ) from None


def _size(scope: Scope, path: bytes) -> int:
    """Bytes of a header. h11 bounds only those that are not complete yet; this one may have come at once."""
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return fields + len(path) + len(scope.get("query_string", b""))


def too_large(most: int) -> ApiError:
    """413."""
    return ApiError(413, f"the request is larger than {most} bytes", code="request_too_large")


class _Body:
    """``receive`` that counts the body's bytes and waits for them only so long."""

    def __init__(self, receive: Receive, most: int, patience: float) -> None:
        self._receive, self._most, self._got, self._whole = receive, most, 0, False
        self._deadline = asyncio.get_running_loop().time() + patience
        self.error: ApiError | None = None

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.error = ApiError(408, "the request's body did not come in time", code="request_timeout")
            raise self.error from None
        if message["type"] == "http.request":
            self._got += len(message.get("body", b""))
            if self._got > self._most:
                self.error = too_large(self._most)
                raise self.error
            self._whole = not message.get("more_body", False)
        return message


class _Visit:
    """One request: its id, its status, its line in the log."""

    def __init__(self, scope: Scope, headers: dict[bytes, bytes], send: Send, traces: Traces | None) -> None:
        asked = headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = asked if _ID.fullmatch(asked) else secrets.token_hex(16)
        scope["modelmill.request_id"] = self.id
        self._scope, self._send, self._began = scope, send, time.perf_counter()
        self._status: int | None = None
        self._headers, self._traces = headers, traces
        self.body: _Body | None = None

    async def send(self, message: Message) -> None:
        """Adds the request's id to the response's headers."""
        if self.body is not None and self.body.error is not None and self._status is None:
            return  # somebody took our refusal of the body for his own; ours is sent
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self.id.encode())]}
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error, where no answer has begun."""
        if self._status is not None:
            return
        self.body = None
        body = json.dumps(error.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        if error.status in (408, 413, 431):
            headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def end(self) -> None:
        """One line: counts and times, nothing of what was said."""
        told: dict[str, Any] = {
            "request_id": self.id,
            "method": self._scope["method"],
            "path": self._scope["path"][:100],
            "status": self._status,
            "ms": round(1000 * (time.perf_counter() - self._began), 1),
        }
        ticket = self._scope.get("modelmill.ticket")
        if isinstance(ticket, Ticket):
            told |= ticket.counts()
        if self._traces is not None:
            visited = Visited(self._scope, self._headers, self.id, self._status, self._began)
            told["trace_id"] = self._traces.told(visited)
        _log.info("request", extra={"data": told})
