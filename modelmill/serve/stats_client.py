"""The server's side of an engine's statistics: one report for each message, over all workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace

from modelmill.core.types import EngineStats
from modelmill.serve.worker_messages import GetStats, Message, StatsReply


class StatsClient:
    """The latest statistics of one engine; its counters continue over restarts of the worker."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[EngineStats]] = {}
        self._latest: EngineStats | None = None
        self._previous = _zero_stats(0)

    @property
    def total_stats(self) -> EngineStats | None:
        """Counters since the server started and the latest gauges; None before any report."""
        return None if self._latest is None else _add_earlier_counters(self._latest, self._previous)

    async def refresh_stats(self, timeout: float) -> None:
        """Ask the worker for a report and wait for it, at most ``timeout`` seconds."""
        number = next(self._numbers)
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        self._send(GetStats(number))
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, timeout)
        finally:
            self._futures.pop(number, None)

    def handle_message(self, reply: StatsReply) -> None:
        """Take a report of the worker."""
        self._latest = EngineStats(**reply.stats)
        future = self._futures.get(reply.number)
        if future is not None and not future.done():
            future.set_result(self._latest)

    def on_worker_lost(self) -> None:
        """End all requests for reports; gauges are zero until the next worker reports."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(TimeoutError())
        if self._latest is not None:
            self._previous = _add_earlier_counters(self._latest, self._previous)
            self._latest = _stats_between_workers(self._latest)


def _zero_stats(num_pages: int) -> EngineStats:
    """Statistics of an engine that has done nothing yet."""
    return EngineStats(0, 0, num_pages, num_pages, 0, 0, 0, 0, 0, 0)


def _stats_between_workers(last: EngineStats) -> EngineStats:
    """Statistics while no worker runs: the limits, and zero otherwise."""
    return replace(
        _zero_stats(last.pages),
        kept_pages=last.kept_pages,
        page_bytes=last.page_bytes,
        state_bytes=last.state_bytes,
        snapshot_slots=last.snapshot_slots,
        pages_by_window=dict.fromkeys(last.pages_by_window, 0),
    )


def _add_earlier_counters(now: EngineStats, before: EngineStats) -> EngineStats:
    """Gauges of ``now``, and counters of both."""
    return replace(
        now,
        steps=now.steps + before.steps,
        prompt_tokens=now.prompt_tokens + before.prompt_tokens,
        output_tokens=now.output_tokens + before.output_tokens,
        cached_tokens=now.cached_tokens + before.cached_tokens,
        preemptions=now.preemptions + before.preemptions,
        restored_states=now.restored_states + before.restored_states,
    )
