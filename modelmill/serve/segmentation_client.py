"""The API process's side of a segmentation engine: pending jobs and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from modelmill.core.errors import CapacityError, ModelmillError, RequestError
from modelmill.serve.segmentation_messages import (
    SegmentationFailure,
    SegmentationJob,
    SegmentationResult,
)

METRIC_PREFIX = "modelmill:"
SUBSECOND_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
SEGMENT_LATENCY_BUCKETS = (*SUBSECOND_BUCKETS, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
MAX_WAITING_BYTES = 256 << 20
"""Limit of image bytes that wait for one engine."""


class ImageNotCached(RequestError):
    """The embedding of an image_id is not cached (any more)."""


class FieldError(RequestError):
    """A field of the request, ``param``, is invalid."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class PendingSegmentation:
    """One pending job; ``close`` aborts it unless it has finished."""

    def __init__(self, job: SegmentationJob, abandon: Callable[[str], None]) -> None:
        self.id, self.nbytes = job.id, len(job.image) + sum(map(len, job.masks))
        self.started_at = time.perf_counter()
        self._future: asyncio.Future[SegmentationResult] = (
            asyncio.get_running_loop().create_future()
        )
        self._abandon = abandon

    async def wait_until_finished(self) -> SegmentationResult:
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

    def set_result(self, result: SegmentationResult) -> None:
        """Finish with a result."""
        if not self._future.done():
            self._future.set_result(result)

    def set_error(self, error: ModelmillError) -> None:
        """Finish with an error."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it as retrieved: the waiting task may be gone


class SegmentationMetrics:
    """Metrics of all segmentation engines of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        label = ("model_name",)
        name, help = METRIC_PREFIX + "segment_latency_seconds", "From the request to its masks."
        self.latency = Histogram(
            name, help, label, buckets=SEGMENT_LATENCY_BUCKETS, registry=registry
        )
        self.masks = Counter(
            METRIC_PREFIX + "segment_masks", "Masks that were returned.", label, registry=registry
        )
        self.queries = Counter(
            METRIC_PREFIX + "image_cache_queries", "Images requested.", label, registry=registry
        )
        self.hits = Counter(
            METRIC_PREFIX + "image_cache_hits",
            "Images with a cached embedding.",
            label,
            registry=registry,
        )


class SegmentationClient:
    """Pending jobs of one engine."""

    def __init__(
        self, name: str, send: Callable[[SegmentationJob], None], abandon: Callable[[str], None]
    ) -> None:
        """Start without jobs.

        Args:
            name: of the engine, for metrics.
            send: sends a job to the worker.
            abandon: aborts the job of an id at the worker.
        """
        self.metrics: SegmentationMetrics | None = None
        self._name = name
        self._send = send
        self._send_abort = abandon
        self._waiting: dict[str, PendingSegmentation] = {}
        self._waiting_bytes = 0

    def set_metrics(self, metrics: SegmentationMetrics) -> None:
        """Count jobs in these metrics from now on."""
        self.metrics = metrics

    def __len__(self) -> int:
        return len(self._waiting)

    def is_full(self, job: SegmentationJob, max_waiting: int) -> bool:
        """Whether there is no room for another job."""
        nbytes = len(job.image) + sum(map(len, job.masks))
        return len(self._waiting) >= max_waiting or (
            bool(self._waiting) and self._waiting_bytes + nbytes > MAX_WAITING_BYTES
        )

    def submit(self, job: SegmentationJob) -> PendingSegmentation:
        """Send a job to the worker."""
        pending = PendingSegmentation(job, self._on_job_abandoned)
        self._waiting[job.id] = pending
        self._waiting_bytes += pending.nbytes
        self._send(job)
        return pending

    def handle_message(self, message: SegmentationResult | SegmentationFailure) -> None:
        """Finish a job with the worker's message."""
        pending = self._remove_job(message.id)
        if pending is None:
            return
        if isinstance(message, SegmentationResult):
            self._update_metrics(message, pending)
            pending.set_result(message)
        elif message.code == "memory":
            pending.set_error(CapacityError(message.message))
        elif message.code == "unknown":
            pending.set_error(ImageNotCached(message.message))
        else:
            pending.set_error(
                FieldError(message.message, message.param)
                if message.param
                else RequestError(message.message)
            )

    def fail_all(self, error: ModelmillError) -> None:
        """Fail all jobs: the worker is gone, or the server is shutting down."""
        for id in list(self._waiting):
            pending = self._remove_job(id)
            if pending is not None:
                pending.set_error(error)

    def _update_metrics(self, result: SegmentationResult, pending: PendingSegmentation) -> None:
        if self.metrics is None:
            return
        self.metrics.latency.labels(self._name).observe(time.perf_counter() - pending.started_at)
        self.metrics.masks.labels(self._name).inc(len(result.payload["masks"]))
        self.metrics.queries.labels(self._name).inc()
        self.metrics.hits.labels(self._name).inc(int(result.payload["image"]["cached"]))

    def _on_job_abandoned(self, id: str) -> None:
        if self._remove_job(id) is not None:
            self._send_abort(id)

    def _remove_job(self, id: str) -> PendingSegmentation | None:
        pending = self._waiting.pop(id, None)
        if pending is not None:
            self._waiting_bytes -= pending.nbytes
        return pending
