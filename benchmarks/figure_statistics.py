"""Compute a figure from measured times, with the same functions for modelmill and for peers.

What goes in are seconds of whole calls, from handing in the requests until all their tokens are on
the host. Time
per token is a difference of two such calls, so that the first token, whatever a side does there,
drops out of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SHORT, LONG = 16, 144
"""Tokens of the two calls whose difference is the time of LONG - SHORT steps."""


@dataclass(frozen=True)
class MeasuredFigure:
    """One measured figure: its value, the minimum and maximum over rounds, and seconds per call."""

    value: float
    min: float
    max: float
    runs: int
    calls: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, without the calls."""
        return {name: value for name, value in asdict(self).items() if name != "calls"}


def time_per_token(short: Sequence[float], long: Sequence[float]) -> MeasuredFigure:
    """Milliseconds per step: difference of the median long and short calls over the steps between.

    short, long: seconds of the calls with SHORT and LONG tokens, round by round; the spread is over
    the rounds.
    Raises ValueError where they are not as many, or none.
    """
    if not short or len(short) != len(long):
        raise ValueError(
            f"{len(short)} short and {len(long)} long calls; there must be one of each a round"
        )
    scale = 1e3 / (LONG - SHORT)
    rounds = [(b - a) * scale for a, b in zip(short, long, strict=True)]
    value = (statistics.median(long) - statistics.median(short)) * scale
    calls = {str(SHORT): list(short), str(LONG): list(long)}
    return MeasuredFigure(value, min(value, *rounds), max(value, *rounds), len(rounds), calls)


def whole_call_figure(seconds: Sequence[float], scale: float = 1.0) -> MeasuredFigure:
    """Median, least and most of whole calls, times ``scale``. Raises ValueError for none."""
    if not seconds:
        raise ValueError("no call was measured")
    ends = min(seconds) * scale, max(seconds) * scale
    return MeasuredFigure(
        statistics.median(seconds) * scale, *ends, len(seconds), {"all": list(seconds)}
    )


def speedup(peer: MeasuredFigure, engine: MeasuredFigure) -> float:
    """How many times ours the peer takes. Above 1, ours is faster."""
    return peer.value / engine.value
