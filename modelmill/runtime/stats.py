"""Statistics of an engine core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counters since the engine was opened, and current gauges.

    Attributes:
        free_pages: Pages that can be allocated, idle ones included.
        cached_pages: Pages in the prefix cache.
        cached_tokens: Prompt tokens taken from the prefix cache.
        idle_pages: Unreferenced pages, kept for their prefixes.
        kept_pages: Most idle pages that may be kept while unused pages are available.
        touched_pages: Pages ever written; a cache in RAM takes memory for these only.
        page_bytes: Bytes of one page on all ranks together.
    """

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
