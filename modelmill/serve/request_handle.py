"""What one HTTP request waits for: the outputs of its prompts, as they arrive.

Stream items are buffered until they are fetched. A slow client therefore costs only the memory of
its unread items, up to a limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from modelmill.core.errors import CapacityError, ModelmillError
from modelmill.outputs import OutputDelta
from modelmill.request_output_state import RequestOutputState

MAX_PENDING_ITEMS = 16384
"""Limit of buffered stream items per request; each logprob entry counts as one more."""


class PromptOutputDelta(NamedTuple):
    """A delta and the index of its prompt in the request."""

    prompt_index: int
    delta: OutputDelta


class WorkerLost(ModelmillError):
    """The worker process ended while it processed the request."""


class ClientTooSlow(CapacityError):
    """A client did not read its response fast enough."""


class HttpRequestHandle:
    """The prompts of one HTTP request; ``close`` aborts those that have not finished."""

    def __init__(
        self, request_states: Sequence[RequestOutputState], abandon: Callable[[Sequence[str]], None]
    ) -> None:
        """Track requests until they finish.

        Args:
            request_states: one per prompt.
            abandon: called with the engine's request ids that are aborted.
        """
        self.request_states = list(request_states)
        self.created_at = time.perf_counter()
        self.queue_seconds: float | None = None  # of the prompt that started first
        self.num_sequences = sum(each.request.params.n for each in request_states)
        self._abandon = abandon
        self._unfinished = {each.request.id: index for index, each in enumerate(request_states)}
        self._pending_items: list[PromptOutputDelta] = []
        self._pending_weight = 0
        self._error: BaseException | None = None
        self._wake = asyncio.Event()

    def record_first_queue_time(self, queue_seconds: float) -> None:
        """Record how long the first prompt that started has waited."""
        if self.queue_seconds is None:
            self.queue_seconds = queue_seconds

    # -- for the route

    async def fetch_items(self, timeout: float | None = None) -> list[PromptOutputDelta]:
        """Return the items since the last call; wait for at least one; [] once all have finished.

        Args:
            timeout: seconds to wait.

        Raises:
            TimeoutError: nothing arrived within ``timeout``.
            BaseException: the error passed to ``fail``.
        """
        while not self._pending_items:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return []
            self._wake.clear()
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        items, self._pending_items, self._pending_weight = self._pending_items, [], 0
        return items

    async def wait_until_finished(self) -> None:
        """Wait until all prompts have finished."""
        while await self.fetch_items():
            pass

    def usage_and_ttft(self) -> dict[str, int | float | None]:
        """Token counts and the time to the first token, as the access log has them."""
        outputs = [each.output for each in self.request_states]
        first = [
            each.first_token_seconds for each in outputs if each.first_token_seconds is not None
        ]
        return {
            "prompt_tokens": sum(each.prompt_tokens for each in self.request_states),
            "completion_tokens": sum(
                len(output.token_ids) for each in outputs for output in each.outputs
            ),
            "cached_tokens": sum(each.cached_tokens for each in outputs),
            "first_token_ms": round(1000 * min(first), 1) if first else None,
        }

    @property
    def aborted_metric_label(self) -> str:
        """Metric label of aborted outputs: "error" after a lost worker, else "abort"."""
        return "error" if isinstance(self._error, WorkerLost) else "abort"

    def close(self) -> None:
        """Abort the prompts that have not finished; a second call does nothing."""
        unfinished, self._unfinished = list(self._unfinished), {}
        self._pending_items = []
        if unfinished:
            self._abandon(unfinished)
        self._wake.set()

    # -- for the engine

    def add_delta(self, id: str, delta: OutputDelta, weight: int = 1) -> None:
        """Buffer an item of the request ``id``.

        Args:
            id: the engine's request id; unknown ones are ignored.
            delta: the new output.
            weight: how much it counts towards MAX_PENDING_ITEMS.
        """
        index = self._unfinished.get(id)
        if index is None:
            return
        self._pending_items.append(PromptOutputDelta(index, delta))
        self._pending_weight += weight
        if delta.output.finished:
            del self._unfinished[id]
        elif self._pending_weight > MAX_PENDING_ITEMS:
            self.fail(
                ClientTooSlow("the client does not read its answer; the request was given up")
            )
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """End the request with an error; no further items follow."""
        if self._error is None:
            self._error = error
        unfinished, self._unfinished = list(self._unfinished), {}
        if unfinished:
            self._abandon(unfinished)
        self._wake.set()
