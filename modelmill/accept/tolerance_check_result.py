"""One comparison of the engine with the reference, and whether it is within its bound."""

from __future__ import annotations

from dataclasses import dataclass

from modelmill.accept.error_metrics import ErrorMetrics
from modelmill.accept.tolerances import ErrorBound


@dataclass(frozen=True)
class ToleranceCheckResult:
    """One comparison against its bound.

    Attributes:
        layer: None for embedding, final norm and head.
        name: the engine's module path.
    """

    name: str
    layer: int | None
    module: str
    metrics: ErrorMetrics
    bound: ErrorBound

    @property
    def is_within_bound(self) -> bool:
        """Return whether the row is within its published bound."""
        return not self.bound.describe_violations(self.metrics)

    @property
    def max_abs_tolerance(self) -> float:
        """Return the bound on max_abs: a share of the reference tensor's scale."""
        return self.bound.max_rel * self.metrics.scale
