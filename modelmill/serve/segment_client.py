"""The API's side of a segmentation engine: what is asked of its worker, who waits for it, and the
counters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from modelmill.core.errors import CapacityError, ModelmillError, RequestError
from modelmill.serve.segment_messages import SegmentFailure, SegmentJob, SegmentResult

PREFIX = "modelmill:"
SEGMENT_LATENCY_BUCKETS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
)
MAX_WAITING_BYTES = 256 << 20
"""Of pictures that wait for one engine."""


class UnknownImage(RequestError):
    """The embedding that an image_id names is not kept (any more)."""


class FieldError(RequestError):
    """param: the request's field that is at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class PendingSegment:
    """One request that waits; ``close`` gives it up where it has no answer yet."""

    def __init__(self, job: SegmentJob, abandon: Callable[[str], None]) -> None:
        self.id, self.nbytes = job.id, len(job.image) + sum(map(len, job.masks))
        self.started_at = time.perf_counter()
        self._future: asyncio.Future[SegmentResult] = asyncio.get_running_loop().create_future()
        self._abandon = abandon

    async def finish(self) -> SegmentResult:
        """The answer. Raises what went wrong."""
        return await asyncio.shield(self._future)

    def close(self) -> None:
        """Give up; nothing happens where the answer is there."""
        if not self._future.done():
            self._future.cancel()
            self._abandon(self.id)

    def set_result(self, result: SegmentResult) -> None:
        """The answer has come."""
        if not self._future.done():
            self._future.set_result(result)

    def set_error(self, error: ModelmillError) -> None:
        """No answer will come."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # whoever waited may be gone


class SegmentMetrics:
    """Of all segmentation engines of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        label = ("model_name",)
        name, help = PREFIX + "segment_latency_seconds", "From the request to its masks."
        self.latency = Histogram(
            name, help, label, buckets=SEGMENT_LATENCY_BUCKETS, registry=registry
        )
        self.masks = Counter(
            PREFIX + "segment_masks", "Masks that were told.", label, registry=registry
        )
        self.queries = Counter(
            PREFIX + "image_cache_queries", "Pictures looked at.", label, registry=registry
        )
        self.hits = Counter(
            PREFIX + "image_cache_hits", "Of them, embeddings found kept.", label, registry=registry
        )


class SegmentClient:
    """Who waits for the worker of one engine."""

    def __init__(
        self, name: str, send: Callable[[SegmentJob], None], abandon: Callable[[str], None]
    ) -> None:
        """send: to the worker. abandon: tell it that nobody waits for this id any more."""
        self.metrics: SegmentMetrics | None = None
        self._name, self._send, self._send_abort = name, send, abandon
        self._waiting: dict[str, PendingSegment] = {}
        self._waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def is_full(self, job: SegmentJob, max_waiting: int) -> bool:
        """Whether too much waits for one more."""
        more = len(job.image) + sum(map(len, job.masks))
        return len(self._waiting) >= max_waiting or (
            bool(self._waiting) and self._waiting_bytes + more > MAX_WAITING_BYTES
        )

    def submit(self, job: SegmentJob) -> PendingSegment:
        """Send it to the worker."""
        glance = PendingSegment(job, self._on_abandoned)
        self._waiting[job.id] = glance
        self._waiting_bytes += glance.nbytes
        self._send(job)
        return glance

    def handle(self, message: SegmentResult | SegmentFailure) -> None:
        """An answer, or none."""
        glance = self._remove(message.id)
        if glance is None:
            return
        if isinstance(message, SegmentResult):
            self._update_metrics(message, glance)
            glance.set_result(message)
        elif message.code == "memory":
            glance.set_error(CapacityError(message.message))
        elif message.code == "unknown":
            glance.set_error(UnknownImage(message.message))
        else:
            glance.set_error(
                FieldError(message.message, message.param)
                if message.param
                else RequestError(message.message)
            )

    def fail_all(self, error: ModelmillError) -> None:
        """The worker is gone, or the server is to end."""
        for id in list(self._waiting):
            glance = self._remove(id)
            if glance is not None:
                glance.set_error(error)

    def _update_metrics(self, result: SegmentResult, pending: PendingSegment) -> None:
        if self.metrics is None:
            return
        self.metrics.latency.labels(self._name).observe(time.perf_counter() - pending.started_at)
        self.metrics.masks.labels(self._name).inc(len(result.payload["masks"]))
        self.metrics.queries.labels(self._name).inc()
        self.metrics.hits.labels(self._name).inc(int(result.payload["image"]["cached"]))

    def _on_abandoned(self, id: str) -> None:
        if self._remove(id) is not None:
            self._send_abort(id)

    def _remove(self, id: str) -> PendingSegment | None:
        glance = self._waiting.pop(id, None)
        if glance is not None:
            self._waiting_bytes -= glance.nbytes
        return glance
