"""A small client for servers that speak OpenAI's API: one connection a request, streamed, with
times.

Plain asyncio, so that measuring a server costs the machine as little as can be.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from modelmill.core.errors import ModelmillError, RequestError, UsageError

MAX_LINE_BYTES = 1 << 24
# kinds of models that write; other servers, and one that loads, tell none
TEXT_MODEL_TYPES = (None, "language")


@dataclass(frozen=True)
class OpenAIClient:
    """A server. path: what stands before /v1."""

    host: str
    port: int
    path: str
    secure: bool
    key: str | None

    @staticmethod
    def from_url(url: str, key: str | None = None) -> OpenAIClient:
        """Of a base URL, with or without /v1. Raises UsageError."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(
                f"--url {url!r} is no http address; give one like http://127.0.0.1:8000"
            )
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return OpenAIClient(parts.hostname, port or (443 if secure else 80), path, secure, key)

    async def get(self, path: str) -> Any:
        """The JSON at a path. Raises ModelmillError."""
        async with _HttpExchange(self) as exchange:
            await exchange.send("GET", path, None)
            text = b"".join([part async for part in exchange.body()])
        try:
            return json.loads(text)
        except ValueError:
            raise ModelmillError(
                f"{self.host}:{self.port}{self.path}{path} answers no JSON; give the address of "
                "an OpenAI API"
            ) from None

    async def first_model(self) -> str:
        """The first model that the server lists, and that writes where it tells kinds.

        Raises ModelmillError.
        """
        try:
            listed = (await self.get("/v1/models"))["data"]
            return str(next(each for each in listed if each.get("kind") in TEXT_MODEL_TYPES)["id"])
        except (KeyError, StopIteration, TypeError, AttributeError):
            raise ModelmillError(
                "the server lists no model that writes; name one with --model"
            ) from None

    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[tuple[float, dict[str, Any]]]:
        """(when it came, event) for each event of a streamed answer. Raises ModelmillError."""
        async with _HttpExchange(self) as exchange:
            await exchange.send("POST", path, {**body, "stream": True})
            held = b""
            async for part in exchange.body():
                now = time.perf_counter()
                *lines, held = (held + part).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    yield now, _parse_event(data)


class _HttpExchange:
    """One request on one connection."""

    def __init__(self, remote: OpenAIClient) -> None:
        self._client = remote

    async def __aenter__(self) -> _HttpExchange:
        remote = self._client
        context = ssl.create_default_context() if remote.secure else None
        try:
            self._reader, self._writer = await asyncio.open_connection(
                remote.host, remote.port, ssl=context, limit=MAX_LINE_BYTES
            )
        except (OSError, ValueError) as error:  # the latter of a name that no host can have
            why = getattr(error, "strerror", None) or error
            raise ModelmillError(f"{remote.host}:{remote.port} does not answer: {why}") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        """Send it and read the head of the answer.

        Raises ModelmillError for a status that is no success.
        """
        remote = self._client
        data = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {remote.path}{path} HTTP/1.1",
            f"host: {remote.host}:{remote.port}",
            "connection: close",
        ]
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
        if remote.key is not None:
            lines.append(f"authorization: Bearer {remote.key}")
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            raise ModelmillError(
                f"{remote.host}:{remote.port} closed the connection without an answer"
            ) from None
        _, _, rest = head[0].partition(" ")
        if not head[0].startswith("HTTP/") or not rest[:3].isdecimal():
            raise ModelmillError(f"{remote.host}:{remote.port} does not speak HTTP")
        self._headers = {
            n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:])
        }
        status = int(rest[:3])
        if status != 200:
            text = b"".join([part async for part in self.body()])
            kind = RequestError if status == 400 else ModelmillError
            raise kind(f"{path} answers {status}: {_error_message(text)}")

    async def body(self) -> AsyncIterator[bytes]:
        """Its parts as they come."""
        try:
            if self._headers.get("transfer-encoding", "").lower() != "chunked":
                while part := await self._reader.read(1 << 16):
                    yield part
                return
            # an empty line, where the connection has ended, is no number
            while size := int((await self._reader.readline()).split(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, ValueError, OSError):
            raise ModelmillError(
                "the server closed the connection in the middle of an answer"
            ) from None


def _parse_event(data: bytes) -> dict[str, Any]:
    """An event of a stream.

    Raises ModelmillError for what is none, and for one that tells of an error.
    """
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if isinstance(event, dict) and "error" in event:
        raise ModelmillError(f"the server ended the answer: {_error_message(event)}")
    if not _is_well_formed(event):
        raise ModelmillError(
            "the server sent an event that is none of OpenAI's API: "
            f"{data[:80].decode(errors='replace')}"
        )
    return event


def _is_well_formed(event: Any) -> bool:
    """Whether all that is read of an event has the type it is read as."""
    if not isinstance(event, dict):
        return False
    choices, usage = event.get("choices") or [], event.get("usage") or {}
    if not isinstance(choices, list) or not isinstance(usage, dict):
        return False
    counts = [usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")]
    pieces = all(
        isinstance(each, dict) and isinstance(each.get("delta") or {}, dict) for each in choices
    )
    return pieces and all(isinstance(count, int) for count in counts)


def _error_message(answer: Any) -> str:
    """The message of an error."""
    try:
        value = json.loads(answer) if isinstance(answer, bytes) else answer
        return " ".join(str(value["error"]["message"]).split())[:300]
    except (ValueError, KeyError, TypeError):
        return "(no message)"


def _has_content(choice: Mapping[str, Any]) -> bool:
    """Whether a piece holds something of the answer; whose turn it is and why it ended is nothing
    of it.
    """
    delta = choice.get("delta") or {}
    parts = (
        choice.get("text"),
        *(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")),
    )
    return any(parts)


@dataclass
class RequestTiming:
    """One measured request. Times in seconds; start: on the clock of all. error: why it failed."""

    start: float
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first_token_seconds(self) -> float:
        """Until the first text."""
        return self.chunk_times[0] - self.start

    @property
    def total_seconds(self) -> float:
        """Until the last text."""
        return self.chunk_times[-1] - self.start

    @property
    def seconds_per_token(self) -> float | None:
        """Between tokens after the first; None where there is one only."""
        if self.output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def chunk_gaps(self) -> list[float]:
        """Between pieces of text."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:])]


async def time_request(
    client: OpenAIClient, body: Mapping[str, Any], endpoint: str = "completions"
) -> RequestTiming:
    """One answer, measured; what goes wrong is noted in it. endpoint: what stands behind /v1/."""
    found = RequestTiming(time.perf_counter())
    try:
        async for when, event in client.stream(
            f"/v1/{endpoint}", {**body, "stream_options": {"include_usage": True}}
        ):
            usage = event.get("usage")
            if usage:
                found.prompt_tokens = usage.get("prompt_tokens", 0)
                found.output_tokens = usage.get("completion_tokens", 0)
            if any(map(_has_content, event.get("choices") or ())):
                found.chunk_times.append(when)
    except ModelmillError as error:
        found.error = str(error)
    if found.error is None and not found.chunk_times:
        found.error = "the answer was empty"
    found.output_tokens = found.output_tokens or len(found.chunk_times)
    return found
