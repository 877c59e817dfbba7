"""Counters of /metrics that belong to a part of the server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from modelmill.serve.segment_client import PREFIX


def make_counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    """A counter under the server's prefix.

    Args:
        registry: that shows it.
        name: without the prefix.
        text: what it counts.
        labels: names of its labels.

    Returns:
        The counter, registered.
    """
    return Counter(PREFIX + name, text, labels, registry=registry)
