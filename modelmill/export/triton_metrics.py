"""An engine's counters and gauges on Triton's own metrics page, under the names that
``modelmill serve`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelmill.runtime.stats import Stats

PREFIX = "modelmill:"
GAUGES: Mapping[str, tuple[str, Callable[[Stats], float]]] = {
    "num_requests_running": ("Answers that are being computed.", lambda s: s.running),
    "num_requests_waiting": ("Answers that wait to be computed.", lambda s: s.waiting),
    "kv_cache_usage_perc": (
        "Share of the KV pages that are held, 1 is all.",
        lambda s: 1 - s.free_pages / s.pages if s.pages else 0.0,
    ),
}
COUNTERS: Mapping[str, tuple[str, Callable[[Stats], float]]] = {
    "prompt_tokens_total": ("Tokens of prompts that were answered.", lambda s: s.prompt_tokens),
    "generation_tokens_total": ("Tokens of answers.", lambda s: s.output_tokens),
    "num_preemptions_total": ("Preempted sequences.", lambda s: s.preemptions),
    "prefix_cache_queries_total": (
        "Tokens of prompts looked up in the prefix cache.",
        lambda s: s.prompt_tokens,
    ),
    "prefix_cache_hits_total": ("Tokens of prompts found there.", lambda s: s.cached_tokens),
}


class TritonMetrics:
    """Keeps Triton's page at what the engine says; only what has changed is sent."""

    def __init__(self, triton: Any, labels: Mapping[str, str]) -> None:
        """labels: of every line."""
        family = triton.MetricFamily
        tables = ((GAUGES, family.GAUGE), (COUNTERS, family.COUNTER))
        # a family must live as long as its metrics
        self._families = {
            name: family(name=PREFIX + name, description=told, kind=kind)
            for table, kind in tables
            for name, (told, _) in table.items()
        }
        self._metrics = {
            name: found.Metric(labels=dict(labels)) for name, found in self._families.items()
        }
        self._last_values: dict[str, float] = dict.fromkeys(self._families, 0.0)

    def update(self, stats: Stats) -> None:
        """The state of now."""
        for table in (GAUGES, COUNTERS):
            for name, (_, read) in table.items():
                value, last = float(read(stats)), self._last_values[name]
                if value == last:
                    continue
                self._last_values[name] = value
                if table is GAUGES:
                    self._metrics[name].set(value)
                else:
                    self._metrics[name].increment(value - last)
