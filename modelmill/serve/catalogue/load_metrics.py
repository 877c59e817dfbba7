"""Metrics of loading and unloading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from modelmill.serve.prometheus_helpers import make_counter, remove_series
from modelmill.serve.segmentation_client import METRIC_PREFIX

WAKE_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0)
LOAD_BUCKETS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
UNLOAD_REASONS = ("idle", "memory", "request", "reload", "removed")
MODEL_STATES = ("unloaded", "loading", "loaded", "sleeping", "unloading")


class LoadMetrics:
    """How often models were loaded, unloaded and put to sleep, and how long loads took."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        self._seconds = _make_histogram(
            registry, "model_load_seconds", "loading a model", LOAD_BUCKETS
        )
        self._wake_seconds = _make_histogram(
            registry, "model_wake_seconds", "waking a sleeping model up", WAKE_BUCKETS
        )
        self._sleeps = make_counter(
            registry, "model_sleeps", "Models that were put to sleep.", "model_name"
        )
        self._failures = make_counter(
            registry, "model_load_failures", "Loads that failed.", "model_name"
        )
        self._unloads = make_counter(
            registry, "model_unloads", "Models that were unloaded.", "model_name", "reason"
        )

    def add_model(self, name: str) -> None:
        """Show a model before it was loaded."""
        self._seconds.labels(name)
        self._wake_seconds.labels(name)
        self._sleeps.labels(name)
        self._failures.labels(name)
        for reason in UNLOAD_REASONS:
            self._unloads.labels(name, reason)

    def remove_model(self, name: str) -> None:
        """Show a model no longer."""
        remove_series(self._seconds, name)
        remove_series(self._wake_seconds, name)
        remove_series(self._sleeps, name)
        remove_series(self._failures, name)
        for reason in UNLOAD_REASONS:
            remove_series(self._unloads, name, reason)

    def record_load(self, name: str, seconds: float) -> None:
        """Record a load."""
        self._seconds.labels(name).observe(seconds)

    def record_sleep(self, name: str) -> None:
        """Record that a model was put to sleep."""
        self._sleeps.labels(name).inc()

    def record_wake(self, name: str, seconds: float) -> None:
        """Record that a model woke up."""
        self._wake_seconds.labels(name).observe(seconds)

    def record_failure(self, name: str) -> None:
        """Record a load that failed."""
        self._failures.labels(name).inc()

    def record_unload(self, name: str, reason: str) -> None:
        """Record that a model was unloaded; ``reason``: one of UNLOAD_REASONS."""
        self._unloads.labels(name, reason).inc()


def _make_histogram(
    registry: CollectorRegistry, name: str, phase: str, buckets: Sequence[float]
) -> Histogram:
    """Seconds of a phase of a model, until requests can run."""
    text = f"From the start of {phase} to its first possible request."
    return Histogram(
        METRIC_PREFIX + name, text, ("model_name",), buckets=buckets, registry=registry
    )


def load_progress_gauge(fractions: Iterable[tuple[str, float]]) -> Metric:
    """The gauge of the progress of loading.

    Args:
        fractions: (name, progress from 0 to 1) of each engine.
    """
    progress = GaugeMetricFamily(
        METRIC_PREFIX + "model_load_progress",
        "How far a model is loaded, from 0 to 1.",
        labels=["model_name"],
    )
    for name, fraction in fractions:
        progress.add_metric([name], fraction)
    return progress


def catalogue_gauges(
    states: Iterable[tuple[str, str, int]],
    used_bytes: int,
    budget_bytes: int | None,
    sleeping_bytes: int = 0,
) -> list[Metric]:
    """Gauges of the catalogue.

    Args:
        states: (name, state, waiting requests) of each model.
        used_bytes: memory of all engines, as planned and reported.
        budget_bytes: their limit; None: none.
        sleeping_bytes: of the host that the weights of sleeping engines take.
    """
    state = GaugeMetricFamily(
        METRIC_PREFIX + "model_state", "1 for the model's state.", labels=["model_name", "state"]
    )
    waiting = GaugeMetricFamily(
        METRIC_PREFIX + "num_requests_waiting_for_load",
        "Requests that wait until the model is loaded.",
        labels=["model_name"],
    )
    for name, current, count in states:
        waiting.add_metric([name], count)
        for each in MODEL_STATES:
            state.add_metric([name, each], float(each == current))
    memory = GaugeMetricFamily(
        METRIC_PREFIX + "engine_memory_bytes",
        "Weights, KV caches and states of the loaded engines.",
    )
    memory.add_metric([], used_bytes)
    sleeping = GaugeMetricFamily(
        METRIC_PREFIX + "sleeping_engine_memory_bytes",
        "Host memory of the weights of sleeping engines.",
    )
    sleeping.add_metric([], sleeping_bytes)
    families: list[Metric] = [state, waiting, memory, sleeping]
    if budget_bytes is not None:
        budget = GaugeMetricFamily(METRIC_PREFIX + "memory_budget_bytes", "As --memory-budget.")
        budget.add_metric([], budget_bytes)
        families.append(budget)
    return families
