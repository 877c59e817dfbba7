"""Prometheus metrics, under the names that boards for other engines ask for, with our prefix."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from modelmill.answer import Delta
from modelmill.core.types import Finish
from modelmill.dialogue import Dialogue
from modelmill.runtime.stats import Stats
from modelmill.serve.sight import SightMetrics

PREFIX = "modelmill:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5)
TOKENS = {
    "prompt_tokens": "Tokens of prompts that were answered, each once.",
    "generation_tokens": "Tokens of answers, as usage tells them.",
    "prefix_cache_queries": "Tokens of prompts looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens of prompts found there.",
}
EMBEDDING = "embedding"
"""How an input that was embedded ended: nothing was written, and nothing was cut."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All counters of a server; ``of`` gives one engine's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token.", SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens of an answer.", GAPS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to its last token.", LONG)
        self._queue = self._histogram("request_queue_time_seconds", "From the request to its first step.", SECONDS)
        self.sight = SightMetrics(self.registry)
        self._tokens = {name: self._counter(name, help) for name, help in TOKENS.items()}
        self._success = self._counter("request_success", "Answers that ended.", "finished_reason")
        self._restarts = self._counter("worker_restarts", "Workers that were replaced.", "reason")

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, help, ("model_name",), buckets=buckets, registry=self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, ("model_name", *labels), registry=self.registry)

    def of(self, model: str) -> EngineMetrics:
        """One engine's."""
        return EngineMetrics(
            self._first.labels(model),
            self._gap.labels(model),
            self._whole.labels(model),
            self._queue.labels(model),
            {name: counter.labels(model) for name, counter in self._tokens.items()},
            {reason: self._success.labels(model, reason) for reason in (*Finish, EMBEDDING)},
            {reason: self._restarts.labels(model, reason) for reason in ("ended", "hung")},
        )

    def page(self, told: Iterable[tuple[str, Stats]]) -> bytes:
        """The page that is scraped. told: what each engine's worker says now."""
        families = _families(told)
        return generate_latest(self.registry) + b"".join(_text(family) for family in families)


class EngineMetrics:
    """What is observed of one engine's requests."""

    def __init__(
        self,
        first: Histogram,
        gap: Histogram,
        whole: Histogram,
        queue: Histogram,
        tokens: dict[str, Counter],
        ended: dict[str, Counter],
        restarts: dict[str, Counter],
    ) -> None:
        self._first, self._gap, self._whole, self.queue = first.observe, gap.observe, whole.observe, queue.observe
        self._tokens, self._ended, self._restarts = tokens, ended, restarts
        self._last: dict[tuple[str, int], float] = {}

    def told(self, dialogue: Dialogue, delta: Delta, before: tuple[int, int, int]) -> None:
        """One token of an answer, or its end. before: the dialogue's ``counts`` before it.

        So these are the tokens that usage tells: what a worker drew behind a stop string is none of the answer's.
        """
        prompt, written, cached = (now - was for now, was in zip(dialogue.counts(delta.index), before))
        if prompt:
            self._tokens["prompt_tokens"].inc(prompt)
            self._tokens["prefix_cache_queries"].inc(prompt)
        if cached:
            self._tokens["prefix_cache_hits"].inc(cached)
        if written:
            self._tokens["generation_tokens"].inc(written)
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
            given_up = delta.finish_reason in (Finish.ABORT, Finish.ERROR)
            embedded = dialogue.request.pooling is not None and not given_up
            self._ended[EMBEDDING if embedded else delta.finish_reason].inc()
            if delta.answer.seconds is not None:
                self._whole(delta.answer.seconds)

    def broken_off(self, dialogue: Dialogue, reason: str) -> None:
        """The answers to a request that have not ended will not. reason: "abort" or "error"."""
        for output in dialogue.answer.outputs:
            if output.finish_reason is None:
                self._last.pop((dialogue.answer.id, output.index), None)
                self._ended[reason].inc()

    def restarted(self, reason: str) -> None:
        """A worker was replaced. reason: "ended" or "hung"."""
        self._restarts[reason].inc()


def _families(told: Iterable[tuple[str, Stats]]) -> list[Metric]:
    told = list(told)
    gauges = {
        "num_requests_running": ("Answers that are being computed.", lambda s: s.running),
        "num_requests_waiting": (
            "Prompts that wait to be computed, and answers that gave their pages back.",
            lambda s: s.waiting,
        ),
        "kv_cache_usage_perc": ("Share of the KV pages that are held, 1 is all.", _held),
        "kv_cache_limit_bytes": ("Bytes that the KV cache may take.", lambda s: s.pages * s.page_bytes),
        "kv_cache_resident_bytes": (
            "Bytes that it has taken; on a CPU it takes them as it is written.",
            lambda s: s.touched_pages * s.page_bytes,
        ),
        "prefix_cache_limit_bytes": (
            "Of them, bytes that may be taken for kept prefixes.",
            lambda s: s.kept_pages * s.page_bytes,
        ),
        "prefix_cache_resident_bytes": ("Bytes of kept prefixes.", lambda s: s.idle_pages * s.page_bytes),
    }
    counters = {
        "num_preemptions": ("Answers that gave their pages back for a while.", lambda s: s.preemptions),
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
