"""What all routes share: the served engines by name, and the limits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from modelmill.serve.engine_client import EngineClient, EngineState
from modelmill.serve.errors import ApiError, invalid_request
from modelmill.serve.json_scan import JsonLimits
from modelmill.serve.metrics import ServerMetrics
from modelmill.serve.segment_messages import SEGMENTATION
from modelmill.serve.traces import Traces

T = TypeVar("T")
INTERNAL_KEY = "modelmill.internal"
"""Marks the scope of a request that the server makes of itself (``warmup``)."""
TENANT_KEY = "modelmill.tenant"
"""Where a request's scope says with which key it came: a mark, not the key."""


MAX_UNUSED_VALUES = 1 << 20
LARGE_BODY_BYTES, MAX_QUEUED_BODIES = 1 << 20, 4
"""Bytes from which a body waits among the large ones; how many of the largest size may wait."""


@dataclass(frozen=True)
class ServiceLimits:
    """api_keys: any of them opens the door; none: no door. max_body_bytes: of a request that may
    hold pictures; max_text_body_bytes: of one that may not. body_timeout: seconds for a body.

    allowed_origins: whose pages in a browser may ask (CORS). allowed_hosts: names by which the
    server may be called where it has no key, beside addresses and localhost. share_cache: whether
    requests of different keys share
    cached prefixes and embeddings of pictures, which ``cached_tokens`` and the time to an answer
    tell them.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    max_text_body_bytes: int = 4 << 20
    body_timeout: float = 60.0
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    share_cache: bool = False


@dataclass
class Service:
    """engines: by every name they are served under, in order. draining: no new requests are taken.

    traces: where each request's span is told; None: nowhere.
    """

    engines: Mapping[str, EngineClient]
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    draining: bool = False
    num_active: int = 0
    traces: Traces | None = None

    def __post_init__(self) -> None:
        # tokenizers release the interpreter, templates wait for their process
        for engine in self.unique_engines:
            engine.metrics = self.metrics.for_engine(engine.name)
            engine.segment_client.metrics = self.metrics.segment
        self._text_pool = ThreadPoolExecutor(4, thread_name_prefix="modelmill-text")
        # one a lane: each may keep the loop from the interpreter for some milliseconds. Large
        # bodies have a lane of their own, so that somebody's megabytes do not hold up everybody's
        # prompts
        self._small_body_pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-body")
        self._large_body_pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-large-body")
        self._parsing_bytes = {self._small_body_pool: 0, self._large_body_pool: 0}

    @property
    def unique_engines(self) -> list[EngineClient]:
        """Every engine once."""
        return list(dict.fromkeys(self.engines.values()))

    @property
    def ready(self) -> bool:
        """Whether every engine takes requests."""
        return not self.draining and all(
            engine.state is EngineState.READY for engine in self.unique_engines
        )

    def get_engine(self, name: str | None) -> EngineClient:
        """The engine of that name; for None the first that writes text, or the first.

        Raises ApiError 404.
        """
        if name is None:
            return next(
                (engine for engine in self.unique_engines if engine.engine_type != SEGMENTATION),
                self.unique_engines[0],
            )
        found = self.engines.get(name)
        if found is None:
            known = ", ".join(self.engines)
            raise ApiError(404, f"there is no model {name[:100]!r} here; there are {known}",
                param="model",
                           code="model_not_found")  # fmt: skip
        return found

    def get_segment_engine(self, name: str | None) -> EngineClient:
        """The engine of that name; for None the first that segments, or that may turn out to.

        Raises ApiError.
        """
        if name is not None:
            return self.get_engine(name)
        for kind in (SEGMENTATION, None):
            for engine in self.unique_engines:
                if engine.engine_type == kind:
                    return engine
        raise invalid_request("no engine that segments images is served here", "model")

    async def run_in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run text work on a thread, so that streams go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, work, *args)

    async def parse_in_thread(self, work: Callable[..., T], data: bytearray, *args: Any) -> T:
        """Parse a body on a thread, one after another of those of a like size.

        One whose turn has not come is dropped where nobody waits any more (the task is cancelled).
        Raises ApiError 503 where as many bytes as MAX_QUEUED_BODIES bodies of the largest size wait
        already in its lane.
        """
        size, lane = (
            len(data),
            self._small_body_pool if len(data) <= LARGE_BODY_BYTES else self._large_body_pool,
        )
        if (
            self._parsing_bytes[lane]
            and self._parsing_bytes[lane] + size > MAX_QUEUED_BODIES * self.limits.max_body_bytes
        ):
            raise ApiError(
                503, "too many large requests are being read; try again soon",
                "service_unavailable_error", None,
                "busy", {"Retry-After": "1"},
            )  # fmt: skip
        self._parsing_bytes[lane] += size
        future = lane.submit(work, data, *args)
        loop = asyncio.get_running_loop()
        # counted until its thread is done with it, also where nobody waits for it any more
        future.add_done_callback(
            lambda _: _call_soon(loop, lambda: self._finish_parsing(lane, size))
        )
        return await asyncio.wrap_future(future)

    def _finish_parsing(self, lane: ThreadPoolExecutor, size: int) -> None:
        self._parsing_bytes[lane] -= size

    def json_limits(self, unused: bool = False) -> JsonLimits:
        """What a body may hold: as many values as the longest prompt of ids has, and then some.

        unused: whether there may be many that are left out.
        """
        longest = max(
            (
                engine.engine_info.max_model_len
                for engine in self.unique_engines
                if engine.engine_info is not None
            ),
            default=0,
        )
        return JsonLimits(
            max_values=(MAX_UNUSED_VALUES if unused else JsonLimits.max_values) + longest
        )

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._text_pool, self._small_body_pool, self._large_body_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(call)


def tenant_cache_salt(tenant: str, salt: str | None) -> str | None:
    """A request's cache_salt, with which its key's caches are kept apart from others'.

    tenant: "" without keys.
    """
    if not tenant:
        return salt
    return hashlib.sha256(f"{tenant}\0{salt or ''}".encode("utf-8", "surrogatepass")).hexdigest()
