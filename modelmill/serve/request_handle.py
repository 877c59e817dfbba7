"""What one HTTP request waits for: the answers to its prompts, as they come.

News are gathered until they are fetched, so a client that reads slowly costs memory for what it has
not read yet and nothing else; there is a bound to that too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from modelmill.core.errors import CapacityError, ModelmillError
from modelmill.outputs import OutputDelta
from modelmill.request_state import RequestState

MAX_PENDING_ITEMS = 16384
"""Most pieces of news that wait for a client; with log-probabilities each counts as many as it
tells.
"""


class StreamItem(NamedTuple):
    """A delta, and of which of the request's prompts."""

    prompt_index: int
    delta: OutputDelta


class WorkerLost(ModelmillError):
    """The engine's process ended while it answered."""


class ClientTooSlow(CapacityError):
    """A client did not fetch its answer."""


class RequestHandle:
    """The prompts of one HTTP request. ``close`` gives up what has not ended."""

    def __init__(
        self, request_states: Sequence[RequestState], abandon: Callable[[Sequence[str]], None]
    ) -> None:
        """abandon: called with the engine's ids of what is given up."""
        self.request_states = list(request_states)
        self.created_at = time.perf_counter()
        self.queue_seconds: float | None = None
        self.num_sequences = sum(each.request.params.n for each in request_states)
        self._abandon = abandon
        self._unfinished = {each.request.id: place for place, each in enumerate(request_states)}
        self._pending_items: list[StreamItem] = []
        self._pending_weight = 0
        self._error: BaseException | None = None
        self._wake = asyncio.Event()

    # -- for who asked

    async def fetch(self, timeout: float | None = None) -> list[StreamItem]:
        """What came since the last call, waiting for something; [] once all has ended. Raises what
        went wrong.

        TimeoutError where nothing comes for so many seconds.
        """
        while not self._pending_items:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return []
            self._wake.clear()
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        news, self._pending_items, self._pending_weight = self._pending_items, [], 0
        return news

    async def finish(self) -> None:
        """Wait until everything has ended."""
        while await self.fetch():
            pass

    def token_counts(self) -> dict[str, int | float | None]:
        """Tokens and times, for a log."""
        answers = [each.output for each in self.request_states]
        first = [
            each.first_token_seconds for each in answers if each.first_token_seconds is not None
        ]
        return {
            "prompt_tokens": sum(each.prompt_tokens for each in self.request_states),
            "completion_tokens": sum(
                len(output.token_ids) for each in answers for output in each.outputs
            ),
            "cached_tokens": sum(each.cached_tokens for each in answers),
            "first_token_ms": round(1000 * min(first), 1) if first else None,
        }

    @property
    def abort_reason(self) -> str:
        """Why answers that have not ended will not: "error" where the engine is at fault, else
        "abort".
        """
        return "error" if isinstance(self._error, WorkerLost) else "abort"

    def close(self) -> None:
        """Give up what has not ended; closing twice is closing once."""
        left, self._unfinished = list(self._unfinished), {}
        self._pending_items = []
        if left:
            self._abandon(left)
        self._wake.set()

    # -- for the engine

    def add_delta(self, id: str, delta: OutputDelta, weight: int = 1) -> None:
        """One more piece of news of the request ``id``."""
        place = self._unfinished.get(id)
        if place is None:
            return
        self._pending_items.append(StreamItem(place, delta))
        self._pending_weight += weight
        if delta.output.finished:
            del self._unfinished[id]
        elif self._pending_weight > MAX_PENDING_ITEMS:
            self.fail(
                ClientTooSlow("the client does not read its answer; the request was given up")
            )
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come."""
        if self._error is None:
            self._error = error
        left, self._unfinished = list(self._unfinished), {}
        if left:
            self._abandon(left)
        self._wake.set()
