"""Where the loop stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counters since the loop was opened, and gauges of this moment. cached_tokens: prompt tokens not recomputed."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
