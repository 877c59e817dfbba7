"""What all routes share: the served engines by name, and the limits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from modelmill.serve.engine import Engine, State
from modelmill.serve.errors import ApiError, invalid
from modelmill.serve.json_scan import Bounds
from modelmill.serve.metrics import Metrics
from modelmill.serve.pictures import KIND
from modelmill.serve.traces import Traces

T = TypeVar("T")
TENANT = "modelmill.tenant"
"""Where a request's scope says with which key it came: a mark, not the key."""


LARGE_BODY, QUEUED_BODIES = 1 << 20, 4
"""Bytes from which a body waits among the large ones; how many of the largest size may wait."""


@dataclass(frozen=True)
class Limits:
    """keys: any of them opens the door; none: no door. body: most bytes of a request that may hold pictures; text: of
    one that may not. patience: seconds for a body.

    origins: whose pages in a browser may ask (CORS). hosts: names by which the server may be called where it has no
    key, beside addresses and localhost. share_cache: whether requests of different keys share cached prefixes and
    embeddings of pictures, which ``cached_tokens`` and the time to an answer tell them.
    """

    keys: tuple[str, ...] = ()
    body: int = 16 << 20
    text: int = 4 << 20
    patience: float = 60.0
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    share_cache: bool = False


@dataclass
class Service:
    """engines: by every name they are served under, in order. draining: no new requests are taken.

    traces: where each request's span is told; None: nowhere.
    """

    engines: Mapping[str, Engine]
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = False
    active: int = 0
    traces: Traces | None = None

    def __post_init__(self) -> None:
        # tokenizers release the interpreter, templates wait for their process
        for engine in self.distinct:
            engine.metrics = self.metrics.of(engine.name)
            engine.sight.metrics = self.metrics.sight
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="modelmill-text")
        # one a lane: each may keep the loop from the interpreter for some milliseconds. Large bodies have a lane of
        # their own, so that somebody's megabytes do not hold up everybody's prompts
        self._parsers = ThreadPoolExecutor(1, thread_name_prefix="modelmill-body")
        self._large_parsers = ThreadPoolExecutor(1, thread_name_prefix="modelmill-large-body")
        self._parsing = 0

    @property
    def distinct(self) -> list[Engine]:
        """Every engine once."""
        return list(dict.fromkeys(self.engines.values()))

    @property
    def ready(self) -> bool:
        """Whether every engine takes requests."""
        return not self.draining and all(engine.state is State.READY for engine in self.distinct)

    def engine(self, name: str | None) -> Engine:
        """The engine of that name; for None the first that writes text, or the first. Raises ApiError 404."""
        if name is None:
            return next((engine for engine in self.distinct if engine.kind != KIND), self.distinct[0])
        found = self.engines.get(name)
        if found is None:
            known = ", ".join(self.engines)
            raise ApiError(404, f"there is no model {name[:100]!r} here; there are {known}", param="model",
                           code="model_not_found")  # fmt: skip
        return found

    def viewer(self, name: str | None) -> Engine:
        """The engine of that name; for None the first that segments, or that may turn out to. Raises ApiError."""
        if name is not None:
            return self.engine(name)
        for kind in (KIND, None):
            for engine in self.distinct:
                if engine.kind == kind:
                    return engine
        raise invalid("no engine that segments images is served here", "model")

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        """Run text work on a thread, so that streams go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def beside(self, work: Callable[..., T], data: bytearray, *args: Any) -> T:
        """Parse a body on a thread, one after another of those of a like size.

        Raises ApiError 503 where as many bytes as QUEUED_BODIES bodies of the largest size wait already.
        """
        size, lane = len(data), self._parsers if len(data) <= LARGE_BODY else self._large_parsers
        if self._parsing and self._parsing + size > QUEUED_BODIES * self.limits.body:
            raise ApiError(
                503, "too many large requests are being read; try again soon", "service_unavailable_error", None,
                "busy", {"Retry-After": "1"},
            )  # fmt: skip
        self._parsing += size
        future = lane.submit(work, data, *args)
        loop = asyncio.get_running_loop()
        # counted until its thread is done with it, also where nobody waits for it any more
        future.add_done_callback(lambda _: _call_soon(loop, lambda: self._parsed(size)))
        return await asyncio.wrap_future(future)

    def _parsed(self, size: int) -> None:
        self._parsing -= size

    @property
    def json_bounds(self) -> Bounds:
        """What a body may hold: as many values as the longest prompt of ids has, and then some."""
        longest = max((engine.facts.max_model_len for engine in self.distinct if engine.facts is not None), default=0)
        return Bounds(values=Bounds.values + longest)

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._pool, self._parsers, self._large_parsers):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(call)


def salted(tenant: str, salt: str | None) -> str | None:
    """A request's cache_salt, with which its key's caches are kept apart from others'. tenant: "" without keys."""
    if not tenant:
        return salt
    return hashlib.sha256(f"{tenant}\0{salt or ''}".encode("utf-8", "surrogatepass")).hexdigest()
