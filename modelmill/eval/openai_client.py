"""A small streaming client for OpenAI-compatible servers that records chunk arrival times.

One connection per request. Plain asyncio, so that the client takes little CPU time from the server
that it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from modelmill.core.errors import ModelmillError, RequestError, UsageError

MAX_LINE_BYTES = 1 << 24
# model types that generate text; other servers, and a model that is loading, have no type
TEXT_MODEL_TYPES = (None, "language")


def model_cards(listed: Any) -> list[dict[str, Any]]:
    """Return the cards of a server's list of models, those that have an id."""
    cards = listed.get("data") if isinstance(listed, dict) else None
    return [
        card
        for card in (cards if isinstance(cards, list) else ())
        if isinstance(card, dict) and "id" in card
    ]


def text_model_cards(listed: Any) -> list[dict[str, Any]]:
    """Return the same of the models that generate text; ``kind`` is engine_type's older name."""
    return [
        card
        for card in model_cards(listed)
        if card.get("engine_type", card.get("kind")) in TEXT_MODEL_TYPES
    ]


@dataclass(frozen=True)
class OpenAIClient:
    """A server; ``path`` is the URL path before /v1."""

    host: str
    port: int
    path: str
    secure: bool
    key: str | None

    @staticmethod
    def from_url(url: str, key: str | None = None) -> OpenAIClient:
        """Make a client for a base URL, with or without /v1.

        Raises:
            UsageError: if it is not an http or https URL.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(
                f"--url {url!r} is not an HTTP URL; use one like http://127.0.0.1:8000"
            )
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return OpenAIClient(parts.hostname, port or (443 if secure else 80), path, secure, key)

    async def get(self, path: str) -> Any:
        """Return the JSON document at a path. Raises ModelmillError."""
        async with _HttpExchange(self) as exchange:
            await exchange.send_and_read_head("GET", path, None)
            text = b"".join([part async for part in exchange.body()])
        try:
            return json.loads(text)
        except ValueError:
            raise ModelmillError(
                f"{self.host}:{self.port}{self.path}{path} does not return JSON; give the "
                "URL of an OpenAI-compatible API"
            ) from None

    async def first_text_model_id(self) -> str:
        """Return the id of the first text generation model that the server lists.

        Raises ModelmillError.
        """
        return (await self.text_model_ids())[0]

    async def text_model_ids(self) -> list[str]:
        """Return the ids of the text generation models that the server lists, at least one.

        A model without a ``kind`` field counts as one. Raises ModelmillError.
        """
        names = [str(card["id"]) for card in await self.text_model_cards()]
        if not names:
            raise ModelmillError("the server lists no text generation model; set --model")
        return names

    async def text_model_cards(self) -> list[dict[str, Any]]:
        """Return what the server lists of its text generation models. Raises ModelmillError."""
        return text_model_cards(await self.get("/v1/models"))

    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[tuple[float, dict[str, Any]]]:
        """Yield (arrival time, event) for each event of a streamed response.

        Times are of ``time.perf_counter``. Raises ModelmillError.
        """
        async with _HttpExchange(self) as exchange:
            await exchange.send_and_read_head("POST", path, {**body, "stream": True})
            buffer = b""
            # a reader that stops early closes the body, too, and leaves no task behind
            async with contextlib.aclosing(exchange.body()) as body_parts:
                async for part in body_parts:
                    arrived = time.perf_counter()
                    *lines, buffer = (buffer + part).split(b"\n")
                    for line in lines:
                        data = line.removeprefix(b"data:").strip()
                        if not line.startswith(b"data:") or data == b"[DONE]":
                            continue
                        yield arrived, _parse_stream_event(data)


class _HttpExchange:
    """One HTTP request and its response on its own connection."""

    def __init__(self, client: OpenAIClient) -> None:
        self._client = client

    async def __aenter__(self) -> _HttpExchange:
        client = self._client
        context = ssl.create_default_context() if client.secure else None
        try:
            self._reader, self._writer = await asyncio.open_connection(
                client.host, client.port, ssl=context, limit=MAX_LINE_BYTES
            )
        except (OSError, ValueError) as error:  # ValueError: an invalid host name
            why = getattr(error, "strerror", None) or error
            raise ModelmillError(f"{client.host}:{client.port} does not answer: {why}") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def send_and_read_head(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> None:
        """Send the request and read the response head.

        Raises:
            RequestError: for status 400.
            ModelmillError: for any other status than 200, or a broken connection.
        """
        client = self._client
        data = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {client.path}{path} HTTP/1.1",
            f"host: {client.host}:{client.port}",
            "connection: close",
        ]
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
        if client.key is not None:
            lines.append(f"authorization: Bearer {client.key}")
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            raise ModelmillError(
                f"{client.host}:{client.port} closed the connection without a response"
            ) from None
        _, _, rest = head[0].partition(" ")
        if not head[0].startswith("HTTP/") or not rest[:3].isdecimal():
            raise ModelmillError(f"{client.host}:{client.port} does not speak HTTP")
        self._headers = {
            n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:])
        }
        status = int(rest[:3])
        if status != 200:
            text = b"".join([part async for part in self.body()])
            error_type = RequestError if status == 400 else ModelmillError
            raise error_type(f"{path} returned status {status}: {_error_message(text)}")

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts of the response body as they arrive."""
        try:
            if self._headers.get("transfer-encoding", "").lower() != "chunked":
                while part := await self._reader.read(1 << 16):
                    yield part
                return
            # at the end of the connection the line is empty: int() raises ValueError
            while size := int((await self._reader.readline()).split(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, ValueError, OSError):
            raise ModelmillError(
                "the server closed the connection in the middle of a response"
            ) from None


def _parse_stream_event(data: bytes) -> dict[str, Any]:
    """Parse one event of a stream.

    Raises ModelmillError for malformed events and for error events.
    """
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if isinstance(event, dict) and "error" in event:
        raise ModelmillError(
            f"the server ended the response with an error: {_error_message(event)}"
        )
    if not _is_well_formed(event):
        raise ModelmillError(
            "the server sent an event that is not of OpenAI's API: "
            f"{data[:80].decode(errors='replace')}"
        )
    return event


def _is_well_formed(event: Any) -> bool:
    """Whether every field that is read from an event has the expected type."""
    if not isinstance(event, dict):
        return False
    choices, usage = event.get("choices") or [], event.get("usage") or {}
    if not isinstance(choices, list) or not isinstance(usage, dict):
        return False
    counts = [usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")]
    choices_ok = all(
        isinstance(choice, dict) and isinstance(choice.get("delta") or {}, dict)
        for choice in choices
    )
    return choices_ok and all(isinstance(count, int) for count in counts)


def _error_message(answer: Any) -> str:
    """Return the message of an OpenAI error object."""
    try:
        value = json.loads(answer) if isinstance(answer, bytes) else answer
        return " ".join(str(value["error"]["message"]).split())[:300]
    except (ValueError, KeyError, TypeError):
        return "(no message)"


def _has_content(choice: Mapping[str, Any]) -> bool:
    """Whether a choice carries output; a role or a finish reason alone does not count."""
    delta = choice.get("delta") or {}
    parts = (
        choice.get("text"),
        *(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")),
    )
    return any(parts)


@dataclass
class RequestTiming:
    """One measured request.

    Times are in seconds of ``time.perf_counter``. error: why the request failed, or None.
    """

    start: float
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first_token_seconds(self) -> float:
        """Time to the first chunk of text."""
        return self.chunk_times[0] - self.start

    @property
    def total_seconds(self) -> float:
        """Time to the last chunk of text."""
        return self.chunk_times[-1] - self.start

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def chunk_gaps(self) -> list[float]:
        """Seconds between consecutive chunks of text."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:])]


async def time_request(
    client: OpenAIClient, body: Mapping[str, Any], endpoint: str = "completions"
) -> RequestTiming:
    """Send one streamed request and measure it; errors are recorded in the result.

    Args:
        client: the server.
        body: fields of the request.
        endpoint: the path after /v1/.
    """
    timing = RequestTiming(time.perf_counter())
    try:
        async for arrived, event in client.stream(
            f"/v1/{endpoint}", {**body, "stream_options": {"include_usage": True}}
        ):
            usage = event.get("usage")
            if usage:
                timing.prompt_tokens = usage.get("prompt_tokens", 0)
                timing.output_tokens = usage.get("completion_tokens", 0)
            if any(map(_has_content, event.get("choices") or ())):
                timing.chunk_times.append(arrived)
    except ModelmillError as error:
        timing.error = str(error)
    if timing.error is None and not timing.chunk_times:
        timing.error = "the response was empty"
    timing.output_tokens = timing.output_tokens or len(timing.chunk_times)
    return timing
