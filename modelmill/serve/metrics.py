"""Prometheus metrics, under vLLM's names with our prefix, so that its dashboards can be used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase

from modelmill.core.types import EngineStats, FinishReason
from modelmill.outputs import OutputDelta
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.access.key_limits import KeyMetrics
from modelmill.serve.catalogue.load_metrics import LoadMetrics
from modelmill.serve.prometheus_helpers import remove_series
from modelmill.serve.segmentation_client import (
    METRIC_PREFIX,
    SUBSECOND_BUCKETS,
    SegmentationMetrics,
)

LATENCY_BUCKETS = (0.001, *SUBSECOND_BUCKETS, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
E2E_LATENCY_BUCKETS = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
INTER_TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    1.0,
    2.5,
)
TOKEN_COUNTERS = {
    "prompt_tokens": "Prompt tokens of processed requests, each prompt once.",
    "generation_tokens": "Generated tokens, as counted in usage.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}
EMBEDDING_FINISH_REASON = "embedding"
"""finished_reason of an embedded input: nothing was generated or cut."""
RESTART_REASONS = ("ended", "hung")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerMetrics:
    """All metrics of a server; ``for_engine`` returns those of one engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._time_to_first_token = self._make_histogram(
            "time_to_first_token_seconds", "From the request to its first token.", LATENCY_BUCKETS
        )
        self._inter_token_latency = self._make_histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", INTER_TOKEN_BUCKETS
        )
        self._e2e_latency = self._make_histogram(
            "e2e_request_latency_seconds",
            "From the request to its last token.",
            E2E_LATENCY_BUCKETS,
        )
        self._queue_time = self._make_histogram(
            "request_queue_time_seconds", "From the request to its first step.", LATENCY_BUCKETS
        )
        self.segment = SegmentationMetrics(self.registry)
        self.loads = LoadMetrics(self.registry)
        self.keys = KeyMetrics(self.registry)
        self._tokens = {
            name: self._make_counter(name, help) for name, help in TOKEN_COUNTERS.items()
        }
        self._success = self._make_counter(
            "request_success", "Finished sequences.", "finished_reason"
        )
        self._restarts = self._make_counter(
            "worker_restarts", "Workers that were replaced.", "reason"
        )

    def _make_histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            METRIC_PREFIX + name, help, ("model_name",), buckets=buckets, registry=self.registry
        )

    def _make_counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(METRIC_PREFIX + name, help, ("model_name", *labels), registry=self.registry)

    def for_engine(self, model: str) -> EngineMetrics:
        """The metrics of one engine."""
        return EngineMetrics(
            self._time_to_first_token.labels(model),
            self._inter_token_latency.labels(model),
            self._e2e_latency.labels(model),
            self._queue_time.labels(model),
            {name: counter.labels(model) for name, counter in self._tokens.items()},
            {
                reason: self._success.labels(model, reason)
                for reason in (*FinishReason, EMBEDDING_FINISH_REASON)
            },
            {reason: self._restarts.labels(model, reason) for reason in RESTART_REASONS},
        )

    def remove_model(self, model: str) -> None:
        """Show an engine no longer."""
        reasons = {
            self._success: (*FinishReason, EMBEDDING_FINISH_REASON),
            self._restarts: RESTART_REASONS,
        }
        segment = self.segment
        by_model: tuple[MetricWrapperBase, ...] = (
            *(self._time_to_first_token, self._inter_token_latency, self._e2e_latency),
            *(self._queue_time, *self._tokens.values()),
            *(segment.latency, segment.masks, segment.queries, segment.hits),
        )
        for metric in by_model:
            remove_series(metric, model)
        for counter, values in reasons.items():
            for reason in values:
                remove_series(counter, model, reason)
        self.loads.remove_model(model)

    def render(
        self, engine_stats: Iterable[tuple[str, EngineStats]], more: Iterable[Metric] = ()
    ) -> bytes:
        """Render the page that Prometheus reads.

        Args:
            engine_stats: (name, current statistics) of each engine.
            more: further gauges.
        """
        families = [*_engine_stats_families(engine_stats), *more]
        return generate_latest(self.registry) + b"".join(
            _render_family(family) for family in families
        )


class EngineMetrics:
    """Metrics of one engine's requests."""

    def __init__(
        self,
        time_to_first_token: Histogram,
        inter_token_latency: Histogram,
        e2e_latency: Histogram,
        queue_time: Histogram,
        tokens: dict[str, Counter],
        finished: dict[str, Counter],
        restarts: dict[str, Counter],
    ) -> None:
        self._observe_first_token = time_to_first_token.observe
        self._observe_inter_token = inter_token_latency.observe
        self._observe_e2e = e2e_latency.observe
        self.observe_queue_time = queue_time.observe
        self._tokens = tokens
        self._finished = finished
        self._restarts = restarts
        self._last_token_time: dict[tuple[str, int], float] = {}

    def record_delta(
        self, request_state: RequestOutputState, delta: OutputDelta, before: tuple[int, int, int]
    ) -> None:
        """Record new tokens of a sequence, or its end.

        Tokens count as in ``usage``: those that a worker generated after a stop string do not.

        Args:
            request_state: of the request.
            delta: its new output.
            before: ``request_state.token_counts`` before ``delta``.
        """
        prompt, generated, cached = (
            now - old for now, old in zip(request_state.token_counts(delta.index), before)
        )
        if prompt:
            self._tokens["prompt_tokens"].inc(prompt)
            self._tokens["prefix_cache_queries"].inc(prompt)
        if cached:
            self._tokens["prefix_cache_hits"].inc(cached)
        if generated:
            self._tokens["generation_tokens"].inc(generated)
        key, now = (delta.output.id, delta.index), time.perf_counter()
        if delta.token_ids:
            last = self._last_token_time.get(key)
            if last is not None:
                self._observe_inter_token(now - last)
            elif delta.index == 0 and delta.output.first_token_seconds is not None:
                self._observe_first_token(delta.output.first_token_seconds)
            self._last_token_time[key] = now
        if delta.finish_reason is not None:
            self._last_token_time.pop(key, None)
            aborted = delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
            embedded = request_state.request.pooling is not None and not aborted
            self._finished[EMBEDDING_FINISH_REASON if embedded else delta.finish_reason].inc()
            if delta.output.seconds is not None:
                self._observe_e2e(delta.output.seconds)

    def record_aborted(self, request_state: RequestOutputState, reason: str) -> None:
        """Record the unfinished sequences of a request as ``reason``: "abort" or "error"."""
        for output in request_state.output.outputs:
            if output.finish_reason is None:
                self._last_token_time.pop((request_state.output.id, output.index), None)
                self._finished[reason].inc()

    def record_restart(self, reason: str) -> None:
        """Record a restart of the worker. reason: "ended" or "hung"."""
        self._restarts[reason].inc()


def _engine_stats_families(engine_stats: Iterable[tuple[str, EngineStats]]) -> list[Metric]:
    engine_stats = list(engine_stats)
    gauges = {
        "num_requests_running": ("Running sequences.", lambda s: s.running),
        "num_requests_waiting": (
            "Waiting prompts and preempted sequences.",
            lambda s: s.waiting,
        ),
        "kv_cache_usage_perc": ("Share of KV pages in use, 1 is all.", _kv_cache_usage),
        "kv_cache_limit_bytes": (
            "Bytes that the KV cache may take.",
            _pages_to_bytes_reader("pages"),
        ),
        "kv_cache_resident_bytes": (
            "Bytes of the KV cache in memory; on a CPU it grows as it is written.",
            _pages_to_bytes_reader("touched_pages"),
        ),
        "prefix_cache_limit_bytes": (
            "Bytes of the KV cache that cached prefixes may take.",
            _pages_to_bytes_reader("kept_pages"),
        ),
        "prefix_cache_resident_bytes": (
            "Bytes of cached prefixes.",
            _pages_to_bytes_reader("evictable_pages"),
        ),
        "state_cache_bytes": (
            "Bytes of recurrent states, of running sequences and snapshots; 0 without any.",
            lambda s: s.state_bytes,
        ),
        "state_cache_snapshots_limit": (
            "Snapshots of recurrent states that the prefix cache can keep.",
            lambda s: s.snapshot_slots,
        ),
        "state_cache_snapshots": (
            "Snapshots of recurrent states in the prefix cache.",
            lambda s: s.snapshots,
        ),
    }
    counters = {
        "num_preemptions": ("Preempted sequences.", lambda s: s.preemptions),
        "state_cache_hits": (
            "Prompts that started from a snapshot of recurrent states.",
            lambda s: s.restored_states,
        ),
    }
    families: list[Metric] = [_kv_bytes_in_use_family(engine_stats)]
    for family_class, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (help, read) in table.items():
            family = family_class(METRIC_PREFIX + name, help, labels=["model_name"])
            for model, stats in engine_stats:
                family.add_metric([model], float(read(stats)))
            families.append(family)
    return families


def _kv_bytes_in_use_family(engine_stats: Iterable[tuple[str, EngineStats]]) -> Metric:
    family = GaugeMetricFamily(
        METRIC_PREFIX + "kv_cache_in_use_bytes",
        "Bytes of KV pages in use, of layers by the tokens that they attend to: all, or a window.",
        labels=["model_name", "window"],
    )
    for model, stats in engine_stats:
        for window, pages in stats.pages_by_window.items():
            family.add_metric([model, window], float(pages * stats.page_bytes))
    return family


def _pages_to_bytes_reader(pages: str) -> Callable[[EngineStats], int]:
    """A field of the statistics that counts pages, in bytes."""
    return lambda stats: getattr(stats, pages) * stats.page_bytes


def _kv_cache_usage(stats: EngineStats) -> float:
    return 1 - stats.free_pages / stats.pages if stats.pages else 0.0


def _render_family(family: Metric) -> bytes:
    class _FamilyCollector:
        def collect(self) -> list[Metric]:
            return [family]

    registry = CollectorRegistry()
    registry.register(_FamilyCollector())
    return generate_latest(registry)
