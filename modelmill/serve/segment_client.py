"""The API process's side of a segmentation engine: pending jobs and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from modelmill.core.errors import CapacityError, ModelmillError, RequestError
from modelmill.serve.segment_messages import SegmentFailure, SegmentJob, SegmentResult

PREFIX = "modelmill:"
SUBSECOND_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
SEGMENT_LATENCY_BUCKETS = (*SUBSECOND_BUCKETS, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
MAX_WAITING_BYTES = 256 << 20
"""Limit of image bytes that wait for one engine."""


class UnknownImage(RequestError):
    """The embedding of an image_id is not cached (any more)."""


class FieldError(RequestError):
    """A field of the request, ``param``, is invalid."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class PendingSegmentation:
    """One pending job; ``close`` aborts it unless it has finished."""

    def __init__(self, job: SegmentJob, abandon: Callable[[str], None]) -> None:
        self.id, self.nbytes = job.id, len(job.image) + sum(map(len, job.masks))
        self.started_at = time.perf_counter()
        self._future: asyncio.Future[SegmentResult] = asyncio.get_running_loop().create_future()
        self._abandon = abandon

    async def finish(self) -> SegmentResult:
        """Wait for the result.

        Raises:
            ModelmillError: the job failed.
        """
        return await asyncio.shield(self._future)

    def close(self) -> None:
        """Abort the job; does nothing if it has finished."""
        if not self._future.done():
            self._future.cancel()
            self._abandon(self.id)

    def set_result(self, result: SegmentResult) -> None:
        """Finish with a result."""
        if not self._future.done():
            self._future.set_result(result)

    def set_error(self, error: ModelmillError) -> None:
        """Finish with an error."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it as retrieved: the waiting task may be gone


class SegmentMetrics:
    """Metrics of all segmentation engines of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        label = ("model_name",)
        name, help = PREFIX + "segment_latency_seconds", "From the request to its masks."
        self.latency = Histogram(
            name, help, label, buckets=SEGMENT_LATENCY_BUCKETS, registry=registry
        )
        self.masks = Counter(
            PREFIX + "segment_masks", "Masks that were returned.", label, registry=registry
        )
        self.queries = Counter(
            PREFIX + "image_cache_queries", "Images requested.", label, registry=registry
        )
        self.hits = Counter(
            PREFIX + "image_cache_hits", "Images with a cached embedding.", label, registry=registry
        )


class SegmentClient:
    """Pending jobs of one engine."""

    def __init__(
        self, name: str, send: Callable[[SegmentJob], None], abandon: Callable[[str], None]
    ) -> None:
        """Start without jobs.

        Args:
            name: of the engine, for metrics.
            send: sends a job to the worker.
            abandon: aborts the job of an id at the worker.
        """
        self.metrics: SegmentMetrics | None = None
        self._name = name
        self._send = send
        self._send_abort = abandon
        self._waiting: dict[str, PendingSegmentation] = {}
        self._waiting_bytes = 0

    def set_metrics(self, metrics: SegmentMetrics) -> None:
        """Count jobs in these metrics from now on."""
        self.metrics = metrics

    def __len__(self) -> int:
        return len(self._waiting)

    def is_full(self, job: SegmentJob, max_waiting: int) -> bool:
        """Whether there is no room for another job."""
        nbytes = len(job.image) + sum(map(len, job.masks))
        return len(self._waiting) >= max_waiting or (
            bool(self._waiting) and self._waiting_bytes + nbytes > MAX_WAITING_BYTES
        )

    def submit(self, job: SegmentJob) -> PendingSegmentation:
        """Send a job to the worker."""
        pending = PendingSegmentation(job, self._on_abandoned)
        self._waiting[job.id] = pending
        self._waiting_bytes += pending.nbytes
        self._send(job)
        return pending

    def handle(self, message: SegmentResult | SegmentFailure) -> None:
        """Finish a job with the worker's message."""
        pending = self._remove(message.id)
        if pending is None:
            return
        if isinstance(message, SegmentResult):
            self._update_metrics(message, pending)
            pending.set_result(message)
        elif message.code == "memory":
            pending.set_error(CapacityError(message.message))
        elif message.code == "unknown":
            pending.set_error(UnknownImage(message.message))
        else:
            pending.set_error(
                FieldError(message.message, message.param)
                if message.param
                else RequestError(message.message)
            )

    def fail_all(self, error: ModelmillError) -> None:
        """Fail all jobs: the worker is gone, or the server is shutting down."""
        for id in list(self._waiting):
            pending = self._remove(id)
            if pending is not None:
                pending.set_error(error)

    def _update_metrics(self, result: SegmentResult, pending: PendingSegmentation) -> None:
        if self.metrics is None:
            return
        self.metrics.latency.labels(self._name).observe(time.perf_counter() - pending.started_at)
        self.metrics.masks.labels(self._name).inc(len(result.payload["masks"]))
        self.metrics.queries.labels(self._name).inc()
        self.metrics.hits.labels(self._name).inc(int(result.payload["image"]["cached"]))

    def _on_abandoned(self, id: str) -> None:
        if self._remove(id) is not None:
            self._send_abort(id)

    def _remove(self, id: str) -> PendingSegmentation | None:
        pending = self._waiting.pop(id, None)
        if pending is not None:
            self._waiting_bytes -= pending.nbytes
        return pending
