"""An engine's metrics on Triton's metrics page, under the names of ``modelmill serve``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelmill.core.types import EngineStats

METRIC_PREFIX = "modelmill:"
GAUGE_READERS: Mapping[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Running sequences.", lambda s: s.running),
    "num_requests_waiting": ("Waiting sequences.", lambda s: s.waiting),
    "kv_cache_usage_perc": (
        "Share of KV pages in use, 1 is all.",
        lambda s: 1 - s.free_pages / s.pages if s.pages else 0.0,
    ),
}
COUNTER_READERS: Mapping[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prompt_tokens_total": ("Prompt tokens of processed requests.", lambda s: s.prompt_tokens),
    "generation_tokens_total": ("Generated tokens.", lambda s: s.output_tokens),
    "num_preemptions_total": ("Preempted sequences.", lambda s: s.preemptions),
    "prefix_cache_queries_total": (
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prompt_tokens,
    ),
    "prefix_cache_hits_total": (
        "Prompt tokens found in the prefix cache.",
        lambda s: s.cached_tokens,
    ),
}


class TritonMetrics:
    """Copies an engine's statistics to Triton's metrics; only changes are sent."""

    def __init__(self, triton: Any, labels: Mapping[str, str]) -> None:
        """Create the metrics.

        Args:
            triton: Triton's Python module.
            labels: of every metric.
        """
        family = triton.MetricFamily
        tables = ((GAUGE_READERS, family.GAUGE), (COUNTER_READERS, family.COUNTER))
        # a family must live as long as its metrics
        self._families = {
            name: family(name=METRIC_PREFIX + name, description=description, kind=metric_kind)
            for table, metric_kind in tables
            for name, (description, _) in table.items()
        }
        self._metrics = {
            name: each.Metric(labels=dict(labels)) for name, each in self._families.items()
        }
        self._last_values: dict[str, float] = dict.fromkeys(self._families, 0.0)

    def update(self, stats: EngineStats) -> None:
        """Set the metrics to the current statistics."""
        for table in (GAUGE_READERS, COUNTER_READERS):
            for name, (_, read) in table.items():
                value, last = float(read(stats)), self._last_values[name]
                if value == last:
                    continue
                self._last_values[name] = value
                if table is GAUGE_READERS:
                    self._metrics[name].set(value)
                else:
                    self._metrics[name].increment(value - last)
