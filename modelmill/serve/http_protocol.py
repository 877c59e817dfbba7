"""HTTP/1.1 on a socket: uvicorn's protocol, with limits for headers.

A header that is too large is answered with 431, one that does not end in time with 408, both in
OpenAI's format.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from modelmill.serve.errors import ApiError

MAX_HEADER_BYTES = 32 << 10
HEADER_TIMEOUT_SECONDS = 20.0


class HttpProtocol(H11Protocol):
    """uvicorn's protocol of one connection, with a timeout for the request head."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer: a header must arrive within HEADER_TIMEOUT_SECONDS."""
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Restart the timer for the next request of the connection."""
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_header_timer()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout of the request head."""
        self._stop_header_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  the name is uvicorn's
        """Answer data that is not a valid request."""
        is_too_large = self.conn.their_state is h11.ERROR and self._is_header_too_large()
        if is_too_large:
            self._send_error(
                ApiError(
                    431,
                    f"the header is larger than {MAX_HEADER_BYTES} bytes",
                    code="header_too_large",
                )
            )
        else:
            self._send_error(ApiError(400, "this is not an HTTP request"))

    def _is_header_too_large(self) -> bool:
        return len(self.conn.trailing_data[0]) >= MAX_HEADER_BYTES

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0] or self.conn.their_state is not h11.IDLE:
            self._send_error(
                ApiError(408, "the header did not arrive in time", code="request_timeout")
            )
        else:
            self.transport.close()

    def _send_error(self, error: ApiError) -> None:
        """Send an error and close; h11 writes nothing once a response has begun."""
        body = json.dumps(error.body()).encode()
        headers: list[Any] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            parts = (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            for part in parts:
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()
