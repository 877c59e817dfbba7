"""The API's side of a segmentation engine: what is asked of its worker, who waits for it, and the counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from modelmill.core.errors import CapacityError, ModelmillError, RequestError
from modelmill.serve.pictures import Found, Look, Missed

PREFIX = "modelmill:"
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
MOST_BYTES = 256 << 20
"""Of pictures that wait for one engine."""


class UnknownImage(RequestError):
    """The embedding that an image_id names is not kept (any more)."""


class FieldError(RequestError):
    """param: the request's field that is at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class Glance:
    """One request that waits; ``close`` gives it up where it has no answer yet."""

    def __init__(self, look: Look, abandon: Callable[[str], None]) -> None:
        self.id, self.nbytes = look.id, len(look.image) + sum(map(len, look.masks))
        self.began = time.perf_counter()
        self._answer: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._abandon = abandon

    async def finish(self) -> Found:
        """The answer. Raises what went wrong."""
        return await asyncio.shield(self._answer)

    def close(self) -> None:
        """Give up; nothing happens where the answer is there."""
        if not self._answer.done():
            self._answer.cancel()
            self._abandon(self.id)

    def tell(self, found: Found) -> None:
        """The answer has come."""
        if not self._answer.done():
            self._answer.set_result(found)

    def fail(self, error: ModelmillError) -> None:
        """No answer will come."""
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # whoever waited may be gone


class SightMetrics:
    """Of all segmentation engines of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        label = ("model_name",)
        name, help = PREFIX + "segment_latency_seconds", "From the request to its masks."
        self.seconds = Histogram(name, help, label, buckets=SECONDS, registry=registry)
        self.masks = Counter(PREFIX + "segment_masks", "Masks that were told.", label, registry=registry)
        self.queries = Counter(PREFIX + "image_cache_queries", "Pictures looked at.", label, registry=registry)
        self.hits = Counter(PREFIX + "image_cache_hits", "Of them, embeddings found kept.", label, registry=registry)


class Sight:
    """Who waits for the worker of one engine."""

    def __init__(self, name: str, send: Callable[[Look], None], abandon: Callable[[str], None]) -> None:
        """send: to the worker. abandon: tell it that nobody waits for this id any more."""
        self.metrics: SightMetrics | None = None
        self._name, self._send, self._tell_abandoned = name, send, abandon
        self._waiting: dict[str, Glance] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def full(self, look: Look, most: int) -> bool:
        """Whether too much waits for one more."""
        more = len(look.image) + sum(map(len, look.masks))
        return len(self._waiting) >= most or (bool(self._waiting) and self._bytes + more > MOST_BYTES)

    def submit(self, look: Look) -> Glance:
        """Send it to the worker."""
        glance = Glance(look, self._left)
        self._waiting[look.id] = glance
        self._bytes += glance.nbytes
        self._send(look)
        return glance

    def hear(self, message: Found | Missed) -> None:
        """An answer, or none."""
        glance = self._forget(message.id)
        if glance is None:
            return
        if isinstance(message, Found):
            self._count(message, glance)
            glance.tell(message)
        elif message.why == "memory":
            glance.fail(CapacityError(message.message))
        elif message.why == "unknown":
            glance.fail(UnknownImage(message.message))
        else:
            glance.fail(FieldError(message.message, message.param) if message.param else RequestError(message.message))

    def fail_all(self, error: ModelmillError) -> None:
        """The worker is gone, or the server is to end."""
        for id in list(self._waiting):
            glance = self._forget(id)
            if glance is not None:
                glance.fail(error)

    def _count(self, found: Found, glance: Glance) -> None:
        if self.metrics is None:
            return
        self.metrics.seconds.labels(self._name).observe(time.perf_counter() - glance.began)
        self.metrics.masks.labels(self._name).inc(len(found.told["masks"]))
        self.metrics.queries.labels(self._name).inc()
        self.metrics.hits.labels(self._name).inc(int(found.told["image"]["cached"]))

    def _left(self, id: str) -> None:
        if self._forget(id) is not None:
            self._tell_abandoned(id)

    def _forget(self, id: str) -> Glance | None:
        glance = self._waiting.pop(id, None)
        if glance is not None:
            self._bytes -= glance.nbytes
        return glance
