"""What parts of the server that show metrics share: make a counter, remove a series."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics import MetricWrapperBase

from modelmill.serve.segmentation_client import METRIC_PREFIX


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
    return Counter(METRIC_PREFIX + name, text, labels, registry=registry)


def remove_series(metric: MetricWrapperBase, *labels: str) -> None:
    """Show a series no longer; one that is not shown is no error.

    Args:
        metric: of which it is.
        labels: values of its labels.
    """
    with contextlib.suppress(KeyError):
        metric.remove(*labels)
