"""Outermost ASGI layer: request id, API key, body limits, access log.

With keys configured, every path except /health and the page's files needs one. The check uses the
raw path, before any routing.
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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelmill.core import log
from modelmill.serve.access.key_policy import KeyPolicy
from modelmill.serve.dialects.anthropic_models import ANTHROPIC_VERSION_HEADER
from modelmill.serve.dialects.error_format import ANTHROPIC_PREFIX, error_body
from modelmill.serve.errors import ApiError
from modelmill.serve.http_protocol import MAX_HEADER_BYTES
from modelmill.serve.request_handle import HttpRequestHandle
from modelmill.serve.request_target import normalize_request, sent_method
from modelmill.serve.routes.page import PAGE_PATHS
from modelmill.serve.service import (
    ACCOUNTING_SCOPE_KEY,
    ADMIN_SCOPE_KEY,
    INTERNAL_SCOPE_KEY,
    LEASES_SCOPE_KEY,
    OWNER_SCOPE_KEY,
    POLICY_SCOPE_KEY,
    TENANT_SCOPE_KEY,
    Service,
    ServiceLimits,
)
from modelmill.serve.traces import FinishedRequest, RequestTracer

PUBLIC_PATHS = (b"/health", b"/ping", *PAGE_PATHS)
IMAGE_INPUT_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/responses",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/segment",
    "/api/chat",
    "/api/generate",
    "/tokenize",
    "/invocations",
)
"""Paths whose requests may contain images."""
PATHS_SERVED_WHILE_DRAINING = (b"/health", b"/ping", b"/metrics", b"/version")
_REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_HOST_PATTERN = re.compile(
    r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._~-]+)?\])(?::([0-9]{0,5}))?"
)
"""RFC 9112, 3.2: a name or an address, and an optional port; no other part of a URL."""
_log = log.get_logger("serve.access")


class RequestMiddleware:
    """Checks, limits and logs every request."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        limits = service.limits
        policies = [
            *limits.key_policies,
            *_unlimited_policies("api-key", limits.api_keys),
        ]
        self._keys = _hash_policy_keys(policies)
        self._admin_keys = _hash_policy_keys(_unlimited_policies("admin-key", limits.admin_keys))
        self._secret = secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the app, or answer it with an error."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
                return
            await self._app(scope, receive, send)
            return
        scope = normalize_request(scope)
        if INTERNAL_SCOPE_KEY in scope:  # clients cannot set scope keys
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        service = self._service
        context = _RequestContext(scope, headers, send, service.traces)
        service.increment_active_requests()
        try:
            self._authenticate_and_check_request(scope, headers)
            body = context.make_body_reader(receive, service.limits)
            await self._app(scope, body, context.send)
            if body.error is not None:
                raise body.error
        except ApiError as error:
            await context.send_error(error)
        finally:
            for lease in scope.get(LEASES_SCOPE_KEY, ()):
                lease.release()
            if ACCOUNTING_SCOPE_KEY in scope:
                scope[ACCOUNTING_SCOPE_KEY].settle_usage()
            service.decrement_active_requests()
            context.log_request()

    def _authenticate_and_check_request(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raises ApiError for who may not enter."""
        path = scope.get("raw_path") or scope["path"].encode()
        service = self._service
        _check_body_framing(headers)
        name = _parse_host_name(headers.get(b"host", b"").decode("latin-1"))
        digest = _key_digest(headers)
        admin = _find_policy(digest, self._admin_keys)
        policy = admin or _find_policy(digest, self._keys)
        scope[ADMIN_SCOPE_KEY] = admin is not None or not (self._admin_keys or self._keys)
        if not self._keys:
            self._check_host(name)
        elif policy is not None:
            self._set_tenant(scope, digest)
            scope[POLICY_SCOPE_KEY] = policy
        elif path not in PUBLIC_PATHS:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY or as "
                "X-Api-Key: KEY",
                "authentication_error",
                None,
                "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )
        if service.draining and path not in PATHS_SERVED_WHILE_DRAINING:
            raise ApiError(
                503,
                "the server is shutting down",
                "service_unavailable_error",
                None,
                "draining",
                {"Retry-After": "5"},
            )
        if _request_head_size(scope, path) > MAX_HEADER_BYTES:
            raise ApiError(
                431, f"the header is larger than {MAX_HEADER_BYTES} bytes", code="header_too_large"
            )
        length = headers.get(b"content-length", b"0")
        # Python reads no number of more than 4,300 digits; zeros before it are digits like any
        # other (RFC 9110, 8.6)
        limit = _body_limit(scope, service.limits)
        digits = length.lstrip(b"0") or b"0"
        if not length.isdigit() or len(digits) > 18 or int(digits) > limit.max_bytes:
            raise limit.too_large_error()

    def _set_tenant(self, scope: Scope, digest: bytes) -> None:
        """Store the tenant and owner of a request, which separate what different keys may see.

        It is an HMAC of the key with a random secret, so it cannot be guessed.
        """
        owner = hmac.new(self._secret, digest, hashlib.sha256).hexdigest()
        scope[OWNER_SCOPE_KEY] = owner
        if not self._service.limits.share_cache:
            scope[TENANT_SCOPE_KEY] = owner

    def _check_host(self, name: str) -> None:
        """Reject unknown Host headers on a server without keys.

        It prevents web pages from reaching this server under their own name (DNS rebinding).
        """
        if name in ("", "localhost", *self._service.limits.allowed_hosts):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise ApiError(
                403,
                "this server has no key and answers to localhost only; start it with --api-key",
                "permission_error",
            ) from None


def _unlimited_policies(prefix: str, keys: Sequence[str]) -> list[KeyPolicy]:
    """Policies of keys without limits."""
    return [
        KeyPolicy(f"{prefix}-{number}", key, may_raise_priority=True)
        for number, key in enumerate(keys, 1)
    ]


def _hash_policy_keys(policies: Sequence[KeyPolicy]) -> list[tuple[bytes, KeyPolicy]]:
    return [(hashlib.sha256(each.key.encode()).digest(), each) for each in policies]


def _find_policy(digest: bytes, policies: Sequence[tuple[bytes, KeyPolicy]]) -> KeyPolicy | None:
    """The policy of the key with this digest; None for an unknown one."""
    # compare with every key, so that the time reveals nothing
    matches = [each for known, each in policies if hmac.compare_digest(digest, known)]
    return matches[0] if matches else None


def _key_digest(headers: dict[bytes, bytes]) -> bytes:
    """SHA-256 of the key in the request: a bearer token (OpenAI), else X-Api-Key (Anthropic)."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key = token if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return hashlib.sha256(key.strip()).digest()


def _request_head_size(scope: Scope, path: bytes) -> int:
    """Size of a header in bytes.

    h11 limits only incomplete headers; this one may have arrived at once.
    """
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return fields + len(path) + len(scope.get("query_string", b""))


def _check_body_framing(headers: dict[bytes, bytes]) -> None:
    """Raise ApiError for a body with two lengths.

    A proxy that reads the other length would take the rest of the body for a new request (request
    smuggling).
    """
    if b"transfer-encoding" in headers and b"content-length" in headers:
        message = "the request has Content-Length and Transfer-Encoding; send one of them"
        raise ApiError(400, message, headers={"Connection": "close"})


def _parse_host_name(host: str) -> str:
    """The name or address of a Host header, in lower case; "" without one.

    Raises:
        ApiError: 400, it is invalid.
    """
    if not host:
        return ""
    match = _HOST_PATTERN.fullmatch(host)
    if match is None or int(match[2] or 0) > 65535:
        raise ApiError(400, "the Host header must be a name or an address, with or without a port",
                       headers={"Connection": "close"})  # fmt: skip
    return match[1].strip("[]").lower().removesuffix(".")


@dataclass(frozen=True)
class _BodyLimit:
    """Largest body in bytes, and the flag that sets it."""

    max_bytes: int
    flag: str

    def too_large_error(self) -> ApiError:
        """Return the error 413 that names the limit and its flag."""
        message = (
            f"the request is larger than {self.max_bytes} bytes, the most that this path takes "
            f"({self.flag})"
        )
        return ApiError(413, message, code="request_too_large")


def _body_limit(scope: Scope, limits: ServiceLimits) -> _BodyLimit:
    """Body limit of a path; paths without images have a smaller one."""
    if (
        scope["path"] in IMAGE_INPUT_ENDPOINTS
        or limits.max_body_bytes <= limits.max_text_body_bytes
    ):
        return _BodyLimit(limits.max_body_bytes, "--max-body-bytes")
    return _BodyLimit(limits.max_text_body_bytes, "--max-text-body-bytes")


class _LimitedBodyReader:
    """``receive`` with a size limit and a timeout for the body."""

    def __init__(self, receive: Receive, limit: _BodyLimit, timeout: float) -> None:
        self._receive = receive
        self._limit = limit
        self._received_bytes = 0
        self._is_complete = False
        self._deadline = asyncio.get_running_loop().time() + timeout
        self.error: ApiError | None = None

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.error = ApiError(
                408, "the request's body did not come in time", code="request_timeout"
            )
            raise self.error from None
        if message["type"] == "http.request":
            self._received_bytes += len(message.get("body", b""))
            if self._received_bytes > self._limit.max_bytes:
                self.error = self._limit.too_large_error()
                raise self.error
            self._is_complete = not message.get("more_body", False)
        return message


class _RequestContext:
    """One request: its id, status and line in the access log."""

    def __init__(
        self, scope: Scope, headers: dict[bytes, bytes], send: Send, traces: RequestTracer | None
    ) -> None:
        requested_id = headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = (
            requested_id if _REQUEST_ID_PATTERN.fullmatch(requested_id) else secrets.token_hex(16)
        )
        scope["modelmill.request_id"] = self.id
        self._scope = scope
        self._send = send
        self._started_at = time.perf_counter()
        self._status: int | None = None
        self._headers, self._traces = headers, traces
        self._body: _LimitedBodyReader | None = None

    def make_body_reader(self, receive: Receive, limits: ServiceLimits) -> _LimitedBodyReader:
        """Begin to read the body, within the limits; its error becomes the response."""
        self._body = _LimitedBodyReader(
            receive, _body_limit(self._scope, limits), limits.body_timeout
        )
        return self._body

    async def send(self, message: Message) -> None:
        """Send a message, with the request id in the response headers."""
        if self._body is not None and self._body.error is not None and self._status is None:
            return  # the app answered the body error itself; ``send_error`` sends ours
        if message["type"] == "http.response.start":
            self._status = message["status"]
            names = (
                (b"x-request-id", b"request-id") if self._is_for_anthropic else (b"x-request-id",)
            )
            ids = [(name, self.id.encode()) for name in names]
            message = {**message, "headers": [*message.get("headers", ()), *ids]}
        await self._send_omitting_head_body(message)

    @property
    def _is_for_anthropic(self) -> bool:
        """Whether a client of Anthropic's asks, which reads the id by another name."""
        is_path = self._scope["path"].startswith(ANTHROPIC_PREFIX)
        return is_path or ANTHROPIC_VERSION_HEADER.encode() in self._headers

    async def _send_omitting_head_body(self, message: Message) -> None:
        """Send a message; of the body of a response to HEAD only that it has ended."""
        if message["type"] == "http.response.body" and sent_method(self._scope) == "HEAD":
            message = {**message, "body": b""}
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        """Send an error, unless a response has begun."""
        if self._status is not None:
            return
        self._body = None
        for_anthropic = self._is_for_anthropic
        form = error_body(self._scope["path"], error, self.id, for_anthropic=for_anthropic)
        body = json.dumps(form).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        headers += [
            (name.lower().encode(), value.encode()) for name, value in error.headers.items()
        ]
        if error.status in (408, 413, 431):
            headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send_omitting_head_body({"type": "http.response.body", "body": body})

    def log_request(self) -> None:
        """Log one line: counts and times, no text of the request or response."""
        data: dict[str, Any] = {
            "request_id": self.id,
            "method": sent_method(self._scope),
            "path": self._scope["path"][:100],
            "status": self._status,
            "ms": round(1000 * (time.perf_counter() - self._started_at), 1),
        }
        handle = self._scope.get("modelmill.request_handle")
        if isinstance(handle, HttpRequestHandle):
            data |= handle.usage_and_ttft()
        if self._traces is not None:
            finished = FinishedRequest(
                self._scope, self._headers, self.id, self._status, self._started_at
            )
            data["trace_id"] = self._traces.record_span(finished)
        _log.info("request", extra={"data": data})
