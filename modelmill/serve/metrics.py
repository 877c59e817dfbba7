"""Prometheus metrics, under the names that boards for other engines ask for, with our prefix."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from modelmill.answer import Delta
from modelmill.core.types import Finish
from modelmill.runtime.stats import Stats
from modelmill.serve.sight import SightMetrics

PREFIX = "modelmill:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All counters of a server; ``of`` gives one engine's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        label = ("model_name",)
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token.", SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens of an answer.", GAPS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to its last token.", LONG)
        self._queue = self._histogram("request_queue_time_seconds", "From the request to its first step.", SECONDS)
        self.sight = SightMetrics(self.registry)
        self._success = Counter(
            PREFIX + "request_success", "Answers that ended.", (*label, "finished_reason"), registry=self.registry
        )

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, help, ("model_name",), buckets=buckets, registry=self.registry)

    def of(self, model: str) -> EngineMetrics:
        """One engine's."""
        return EngineMetrics(
            self._first.labels(model),
            self._gap.labels(model),
            self._whole.labels(model),
            self._queue.labels(model),
            {reason: self._success.labels(model, reason) for reason in Finish},
        )

    def page(self, told: Iterable[tuple[str, Stats]]) -> bytes:
        """The page that is scraped. told: what each engine's worker says now."""
        families = _families(told)
        return generate_latest(self.registry) + b"".join(_text(family) for family in families)


class EngineMetrics:
    """What is observed of one engine's requests."""

    def __init__(
        self, first: Histogram, gap: Histogram, whole: Histogram, queue: Histogram, ended: dict[str, Counter]
    ) -> None:
        self._first, self._gap, self._whole, self.queue = first.observe, gap.observe, whole.observe, queue.observe
        self._ended = ended
        self._last: dict[tuple[str, int], float] = {}

    def told(self, delta: Delta) -> None:
        """One token of an answer, or its end."""
        key, now = (delta.answer.id, delta.index), time.perf_counter()
        if delta.token_ids:
            last = self._last.get(key)
            if last is not None:
                self._gap(now - last)
            elif delta.index == 0 and delta.answer.first_token_seconds is not None:
                self._first(delta.answer.first_token_seconds)
            self._last[key] = now
        if delta.finish_reason is not None:
            self._last.pop(key, None)
            self._ended[delta.finish_reason].inc()
            if delta.answer.seconds is not None:
                self._whole(delta.answer.seconds)

    def forget(self, id: str, count: int) -> None:
        """A request of ``count`` answers was given up."""
        for index in range(count):
            if self._last.pop((id, index), None) is not None:
                self._ended["abort"].inc()


def _families(told: Iterable[tuple[str, Stats]]) -> list[Metric]:
    told = list(told)
    gauges = {
        "num_requests_running": ("Answers that are being computed.", lambda s: s.running),
        "num_requests_waiting": (
            "Prompts that wait to be computed, and answers that gave their pages back.",
            lambda s: s.waiting,
        ),
        "kv_cache_usage_perc": ("Share of the KV pages that are held, 1 is all.", _held),
    }
    counters = {
        "prompt_tokens": ("Tokens of prompts that were answered.", lambda s: s.prompt_tokens),
        "generation_tokens": ("Tokens of answers.", lambda s: s.output_tokens),
        "num_preemptions": ("Answers that gave their pages back for a while.", lambda s: s.preemptions),
        "prefix_cache_queries": ("Tokens of prompts looked up in the prefix cache.", lambda s: s.prompt_tokens),
        "prefix_cache_hits": ("Tokens of prompts found there.", lambda s: s.cached_tokens),
    }
    families: list[Metric] = []
    for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (help, read) in table.items():
            family = kind(PREFIX + name, help, labels=["model_name"])
            for model, stats in told:
                family.add_metric([model], float(read(stats)))
            families.append(family)
    return families


def _held(stats: Stats) -> float:
    return 1 - stats.free_pages / stats.pages if stats.pages else 0.0


def _text(family: Metric) -> bytes:
    class One:
        def collect(self) -> list[Metric]:
            return [family]

    registry = CollectorRegistry()
    registry.register(One())
    return generate_latest(registry)
