"""The application that clients reach: it hands requests to replicas, and answers for those that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelmill import __version__
from modelmill.core import log
from modelmill.serve import errors, shape
from modelmill.serve.errors import ApiError
from modelmill.serve.metrics import CONTENT_TYPE
from modelmill.serve.replicas.affinity import beginnings
from modelmill.serve.service import TENANT, Service
from modelmill.serve.stream import Stalled, accepted

TRIES = 3
PATIENCE = 60.0
"""Seconds to wait for a replica that takes a request."""
DROPPED = (b"host", b"authorization", b"content-length", b"connection", b"transfer-encoding", b"x-request-id")
_log = log.get("serve.front")


class Replicas(Protocol):
    """Whom the front asks."""

    def ask(
        self, head: dict[str, Any], body: bytes, prefix: Sequence[str], avoid: Sequence[str]
    ) -> AsyncGenerator[Any]:
        """A replica's id, (status, headers), then bytes; raises where the replica is lost. Closing it aborts."""

    async def pages(self) -> list[tuple[str, bytes]]:
        """The metrics of each replica, by id."""

    def state(self) -> dict[str, Any]:
        """status ("ok", "loading" or "unavailable") and how many replicas run."""


class Lost(Exception):
    """A replica is gone, or none came; what it was is in the log."""


class Front:
    """An ASGI application; it stands behind the gate."""

    def __init__(self, replicas: Replicas, service: Service) -> None:
        self._replicas, self._service = replicas, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer here, or let a replica answer. Raises ApiError for what nobody could answer."""
        path = scope["path"]
        if path == "/health":
            await self._health(send)
        elif path == "/version":
            await _json(send, 200, {"version": __version__})
        elif path == "/metrics":
            page = merged(await self._replicas.pages())
            await _whole(send, 200, page, CONTENT_TYPE.encode())
        else:
            await self._relay(scope, receive, send)

    async def _health(self, send: Send) -> None:
        told = self._replicas.state()
        if self._service.draining:
            told["status"] = "draining"
        ok = told["status"] == "ok"
        await _json(send, 200 if ok else 503, told, () if ok else ((b"retry-after", b"2"),))

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._replicas.state()
        if state["status"] != "ok":
            told = f"no replica is ready ({state['status']}); try again soon"
            raise ApiError(503, told, "service_unavailable_error", None, "not_ready", {"Retry-After": "2"})
        body = await _read(receive)
        if body is None:
            return
        relay = _Relay(self._replicas, _head(scope), body, send)
        work, gone = asyncio.create_task(relay.run()), asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


class _Relay:
    """One request on its way through replicas."""

    def __init__(self, replicas: Replicas, head: dict[str, Any], body: bytes, send: Send) -> None:
        self._replicas, self._head, self._body, self._send = replicas, head, body, send
        self._begun = False

    async def run(self) -> None:
        """Until somebody has answered, or the client takes nothing of it for so long."""
        with contextlib.suppress(Stalled):
            await self._answer()

    async def _answer(self) -> None:
        """A replica that is lost before its answer began is followed by another."""
        prefix, avoid = await asyncio.to_thread(beginnings, self._body, self._head["tenant"]), list[str]()
        for left in reversed(range(TRIES)):
            try:
                await self._through(prefix, avoid, last=left == 0)
                return
            except Lost:
                if self._begun:
                    await self._broken()
                    return
        raise ApiError(503, "no replica could answer; try again soon", errors.SERVER, None, "replica_lost",
                       {"Retry-After": "2"})  # fmt: skip

    async def _through(self, prefix: Sequence[str], avoid: list[str], last: bool) -> None:
        """One replica's answer. Raises Lost where it has none: it is gone, or says 503 and may be followed."""
        async with contextlib.aclosing(self._replicas.ask(self._head, self._body, prefix, tuple(avoid))) as told:
            try:
                async with asyncio.timeout(PATIENCE):
                    avoid.append(await anext(told))
                status, headers = await anext(told)
                if status == 503 and not last:
                    raise Lost
                kept = [(name, value) for name, value in headers if name != b"x-request-id"]
                start = {"type": "http.response.start", "status": status, "headers": kept}
                if not any(name == b"content-type" and b"event-stream" in value for name, value in kept):
                    # what is no stream is sent when it is whole, so that another replica may still answer
                    body = b"".join([piece async for piece in told])
                    self._begun = True
                    await self._tell(start)
                    await self._tell(_piece(body, more=False))
                    return
                self._begun = True
                await self._tell(start)
                async for piece in told:
                    await self._tell(_piece(piece))
            except (Lost, ApiError, Stalled):
                raise
            except Exception as error:
                # Ray's own errors carry tracebacks of other processes
                _log.warning("replica lost", extra={"data": {"replica": avoid[-1:], "kind": type(error).__name__}})
                raise Lost from None
        await self._tell(_piece(b"", more=False))

    async def _broken(self) -> None:
        """A stream had begun: it ends with an error and without [DONE]."""
        error = ApiError(503, "the replica ended while it answered", errors.SERVER, None, "replica_lost")
        await self._tell(_piece(shape.event(error.body())))
        await self._tell(_piece(b"", more=False))

    async def _tell(self, message: Message) -> None:
        await accepted(self._send, message)


def merged(pages: Iterable[tuple[str, bytes]]) -> bytes:
    """The metrics of several replicas as one page; each line says whose it is."""
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for found in text_string_to_metric_families(page.decode()):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                family.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)

    class All:
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(All())
    return generate_latest(registry)


def guarded(front: Front, service: Service) -> ASGIApp:
    """The front behind the gate, and behind CORS where origins are allowed."""
    from starlette.middleware.cors import CORSMiddleware

    from modelmill.serve.gate import Gate

    app: ASGIApp = Gate(front, service)
    if service.limits.origins:
        app = CORSMiddleware(app, allow_origins=service.limits.origins, allow_methods=("GET", "POST"),
                             allow_headers=("*",))  # fmt: skip
    return app


def _piece(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _head(scope: Scope) -> dict[str, Any]:
    headers = [(name, value) for name, value in scope["headers"] if name not in DROPPED]
    return {
        "method": scope["method"],
        "path": scope["path"],
        "raw_path": scope.get("raw_path") or scope["path"].encode(),
        "query": scope.get("query_string", b""),
        "tenant": scope.get(TENANT, ""),
        "headers": [*headers, (b"x-request-id", scope["modelmill.request_id"].encode())],
    }


async def _read(receive: Receive) -> bytes | None:
    """The body; None where the client left before its end."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json(send: Send, status: int, value: Any, more: Iterable[tuple[bytes, bytes]] = ()) -> None:
    await _whole(send, status, json.dumps(value).encode(), b"application/json", more)


async def _whole(send: Send, status: int, body: bytes, kind: bytes, more: Iterable[tuple[bytes, bytes]] = ()) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
