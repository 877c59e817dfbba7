"""HTTP/1.1 on a socket, with patience that ends: uvicorn's protocol, and what it leaves open.

A header that grows without end is answered with 431, one that never ends with 408, both in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from modelmill.serve.errors import ApiError

HEADER_BYTES = 32 << 10
HEADER_SECONDS = 20.0


class Http(H11Protocol):
    """One connection."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A header has to come within HEADER_SECONDS."""
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        """A request whose header begins after the last one's end is waited for only so long."""
        if self._waiting is None and (self.cycle is None or self.cycle.response_complete):
            self._await_header()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """The timer goes with the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  the name is uvicorn's
        """What cannot be read as a request."""
        error = self.conn.their_state is h11.ERROR and self._too_long()
        if error:
            self._refuse(ApiError(431, f"the header is larger than {HEADER_BYTES} bytes", code="header_too_large"))
        else:
            self._refuse(ApiError(400, "this is not an HTTP request"))

    def _too_long(self) -> bool:
        return len(self.conn.trailing_data[0]) >= HEADER_BYTES

    def _await_header(self) -> None:
        self._waiting = self.loop.call_later(HEADER_SECONDS, self._late)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _late(self) -> None:
        self._waiting = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0] or self.conn.their_state is not h11.IDLE:
            self._refuse(ApiError(408, "the header did not come in time", code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; h11 writes nothing where a response has begun."""
        body = json.dumps(error.body()).encode()
        headers: list[Any] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            parts = (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
            for part in parts:
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()
