"""The application that forwards requests to replicas and retries lost ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelmill import __version__
from modelmill.core import log
from modelmill.serve import errors, openai_format
from modelmill.serve.dialects.error_format import OLLAMA_PREFIX, error_body, responses_error_event
from modelmill.serve.errors import ApiError
from modelmill.serve.metrics import CONTENT_TYPE
from modelmill.serve.replicas.prefix_affinity import prefix_digests
from modelmill.serve.service import TENANT_SCOPE_KEY, Service
from modelmill.serve.stream import ClientStalled, run_while_connected, send_with_timeout

MAX_ATTEMPTS = 3
REPLICA_TIMEOUT = 60.0
"""Seconds to wait for a replica to accept a request."""
STREAM_TYPES = (b"event-stream", b"x-ndjson")
DROPPED_HEADERS = (
    b"host",
    b"authorization",
    b"x-api-key",
    b"content-length",
    b"connection",
    b"transfer-encoding",
    b"x-request-id",
)
REQUEST_ID_HEADERS = (b"x-request-id", b"request-id")
"""Headers of responses that the server here sends itself."""
_log = log.get_logger("serve.front")


class ReplicaSet(Protocol):
    """The replicas that a ``ReplicaProxy`` calls."""

    def call_replica(
        self, head: dict[str, Any], body: bytes, prefix: Sequence[str], avoid: Sequence[str]
    ) -> AsyncGenerator[Any]:
        """Call a replica; yield its id, (status, headers), then bytes.

        Raises if the replica is lost. Closing the generator aborts the request.
        """

    async def metrics_pages(self) -> list[tuple[str, bytes]]:
        """The metrics of each replica, by id."""

    def state(self) -> dict[str, Any]:
        """The status ("ok", "loading" or "unavailable") and the number of running replicas."""


class ReplicaLost(Exception):
    """A replica is gone or was not available; the log has the reason."""


class ReplicaProxy:
    """An ASGI application, to be used behind ``RequestMiddleware``."""

    def __init__(self, replicas: ReplicaSet, service: Service) -> None:
        self._replicas, self._service = replicas, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request here, or forward it to a replica.

        Raises:
            ApiError: no replica could answer.
        """
        path = scope["path"]
        if path == "/health":
            await self._send_health(send)
        elif path == "/version":
            await _send_json(send, 200, {"version": __version__})
        elif path == "/metrics":
            page = merge_metrics(await self._replicas.metrics_pages())
            await _send_body(send, 200, page, CONTENT_TYPE.encode())
        else:
            await self._forward_request(scope, receive, send)

    async def _send_health(self, send: Send) -> None:
        state = self._replicas.state()
        if self._service.draining:
            state["status"] = "draining"
        ok = state["status"] == "ok"
        await _send_json(send, 200 if ok else 503, state, () if ok else ((b"retry-after", b"2"),))

    async def _forward_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._replicas.state()
        if state["status"] != "ok":
            message = f"no replica is ready ({state['status']}); try again soon"
            raise ApiError(
                503, message, "service_unavailable_error", None, "not_ready", {"Retry-After": "2"}
            )
        body = await _read_body(receive)
        if body is None:
            return
        relay = _ProxiedRequest(self._replicas, _request_head(scope), body, send)
        with contextlib.suppress(ClientDisconnect):
            await run_while_connected(receive, relay.run())


class _ProxiedRequest:
    """One request on its way to a replica."""

    def __init__(self, replicas: ReplicaSet, head: dict[str, Any], body: bytes, send: Send) -> None:
        self._replicas = replicas
        self._head = head
        self._body = body
        self._send = send
        self._started = False

    async def run(self) -> None:
        """Forward the request until it is answered or the client stalls."""
        with contextlib.suppress(ClientStalled):
            await self._forward_with_retries()

    async def _forward_with_retries(self) -> None:
        """Try another replica if one is lost before its response began."""
        prefix, avoid = (
            await asyncio.to_thread(prefix_digests, self._body, self._head["tenant"]),
            list[str](),
        )
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            try:
                await self._try_replica(prefix, avoid, last=attempts_left == 0)
                return
            except ReplicaLost:
                if self._started:
                    await self._end_broken_stream()
                    return
        raise ApiError(503, "no replica could answer; try again soon", errors.SERVER_ERROR, None,
            "replica_lost",
                       {"Retry-After": "2"})  # fmt: skip

    async def _try_replica(self, prefix: Sequence[str], avoid: list[str], last: bool) -> None:
        """Forward the response of one replica.

        Raises:
            ReplicaLost: it has none: it is gone, or answers 503 and is not the last attempt.
        """
        async with contextlib.aclosing(
            self._replicas.call_replica(self._head, self._body, prefix, tuple(avoid))
        ) as response:
            try:
                async with asyncio.timeout(REPLICA_TIMEOUT):
                    avoid.append(await anext(response))
                status, headers = await anext(response)
                if status == 503 and not last:
                    raise ReplicaLost
                forwarded = [
                    (name, value) for name, value in headers if name not in REQUEST_ID_HEADERS
                ]
                start = {"type": "http.response.start", "status": status, "headers": forwarded}
                if not any(
                    name == b"content-type" and any(each in value for each in STREAM_TYPES)
                    for name, value in forwarded
                ):
                    # a response that is not a stream is sent only when complete, so that another
                    # replica can still answer
                    body = b"".join([piece async for piece in response])
                    self._started = True
                    await self._send_message(start)
                    await self._send_message(_body_chunk(body, more=False))
                    return
                self._started = True
                await self._send_message(start)
                async for piece in response:
                    await self._send_message(_body_chunk(piece))
            except (ReplicaLost, ApiError, ClientStalled):
                raise
            except Exception as error:
                # log the class only: Ray's errors contain tracebacks of other processes
                _log.warning(
                    "replica lost",
                    extra={"data": {"replica": avoid[-1:], "error": type(error).__name__}},
                )
                raise ReplicaLost from None
        await self._send_message(_body_chunk(b"", more=False))

    async def _end_broken_stream(self) -> None:
        """End a stream that had begun with an error and without [DONE]."""
        error = ApiError(
            503, "the replica ended during the response", errors.SERVER_ERROR, None, "replica_lost"
        )
        await self._send_message(_body_chunk(_stream_error(self._head["path"], error)))
        await self._send_message(_body_chunk(b"", more=False))

    async def _send_message(self, message: Message) -> None:
        await send_with_timeout(self._send, message)


def _stream_error(path: str, error: ApiError) -> bytes:
    """An error at the end of a stream, as the dialect of its path writes it."""
    is_response = path.startswith("/v1/responses")
    body = responses_error_event(error) if is_response else error_body(path, error)
    if path.startswith(OLLAMA_PREFIX):
        return openai_format.dump_json(body) + b"\n"
    return openai_format.sse_event(body, body.get("type", ""))


def merge_metrics(pages: Iterable[tuple[str, bytes]]) -> bytes:
    """Merge the metrics of several replicas into one page, with a label ``replica``."""
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for page_family in text_string_to_metric_families(page.decode()):
            family = families.setdefault(
                page_family.name,
                Metric(page_family.name, page_family.documentation, page_family.type),
            )
            for sample in page_family.samples:
                family.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)

    class _MergedCollector:
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(_MergedCollector())
    return generate_latest(registry)


def with_middleware(proxy: ReplicaProxy, service: Service) -> ASGIApp:
    """Wrap the proxy in ``RequestMiddleware``, and in CORS if origins are allowed."""
    from starlette.middleware.cors import CORSMiddleware

    from modelmill.serve.middleware import RequestMiddleware

    app: ASGIApp = RequestMiddleware(proxy, service)
    if service.limits.allowed_origins:
        app = CORSMiddleware(app, allow_origins=service.limits.allowed_origins,
            allow_methods=("GET", "POST"),
                             allow_headers=("*",))  # fmt: skip
    return app


def _body_chunk(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _request_head(scope: Scope) -> dict[str, Any]:
    headers = [(name, value) for name, value in scope["headers"] if name not in DROPPED_HEADERS]
    return {
        "method": scope["method"],
        "path": scope["path"],
        "raw_path": scope.get("raw_path") or scope["path"].encode(),
        "query": scope.get("query_string", b""),
        "tenant": scope.get(TENANT_SCOPE_KEY, ""),
        "headers": [*headers, (b"x-request-id", scope["modelmill.request_id"].encode())],
    }


async def _read_body(receive: Receive) -> bytes | None:
    """Read the body; None if the client disconnected before its end."""
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _send_json(
    send: Send, status: int, value: Any, extra_headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    await _send_body(send, status, json.dumps(value).encode(), b"application/json", extra_headers)


async def _send_body(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes,
    extra_headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    headers = [
        (b"content-type", content_type),
        (b"content-length", str(len(body)).encode()),
        *extra_headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
