"""Where the engine stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counters since the engine was opened, and gauges of this moment. cached_tokens: prompt tokens
    not recomputed.

    idle_pages: held by nobody, kept for prefixes; kept_pages: how many of them may take memory that
    nobody has had. touched_pages: that were ever written, which is what a cache in RAM takes.
    page_bytes: of one page, on all ranks."""

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
    idle_pages: int = 0
    kept_pages: int = 0
    touched_pages: int = 0
    page_bytes: int = 0
