"""What one HTTP request waits for: the answers to its prompts, as they come.

News are gathered until they are fetched, so a client that reads slowly costs memory for what it has not read yet and
nothing else; there is a bound to that too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from modelmill.answer import Delta
from modelmill.core.errors import CapacityError, ModelmillError
from modelmill.dialogue import Dialogue

BEHIND = 16384
"""Most pieces of news that wait for a client; with log-probabilities each counts as many as it tells."""


class News(NamedTuple):
    """A delta, and of which of the ticket's prompts."""

    prompt: int
    delta: Delta


class WorkerLost(ModelmillError):
    """The engine's process ended while it answered."""


class TooSlow(CapacityError):
    """A client did not fetch its answer."""


class Ticket:
    """The prompts of one HTTP request. ``close`` gives up what has not ended."""

    def __init__(self, dialogues: Sequence[Dialogue], abandon: Callable[[Sequence[str]], None]) -> None:
        """abandon: called with the engine's ids of what is given up."""
        self.dialogues = list(dialogues)
        self.made = time.perf_counter()
        self.queued: float | None = None
        self.weight = sum(each.request.params.n for each in dialogues)
        self._abandon = abandon
        self._open = {each.request.id: place for place, each in enumerate(dialogues)}
        self._news: list[News] = []
        self._behind = 0
        self._error: BaseException | None = None
        self._wake = asyncio.Event()

    # -- for who asked

    async def fetch(self, seconds: float | None = None) -> list[News]:
        """What came since the last call, waiting for something; [] once all has ended. Raises what went wrong.

        TimeoutError where nothing comes for so many seconds.
        """
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._wake.clear()
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        news, self._news, self._behind = self._news, [], 0
        return news

    async def finish(self) -> None:
        """Wait until everything has ended."""
        while await self.fetch():
            pass

    def counts(self) -> dict[str, int | float | None]:
        """Tokens and times, for a log."""
        answers = [each.answer for each in self.dialogues]
        first = [each.first_token_seconds for each in answers if each.first_token_seconds is not None]
        return {
            "prompt_tokens": sum(each.prompt_tokens for each in self.dialogues),
            "completion_tokens": sum(len(output.token_ids) for each in answers for output in each.outputs),
            "cached_tokens": sum(each.cached_tokens for each in answers),
            "first_token_ms": round(1000 * min(first), 1) if first else None,
        }

    @property
    def broken_off(self) -> str:
        """Why answers that have not ended will not: "error" where the engine is at fault, else "abort"."""
        return "error" if isinstance(self._error, WorkerLost) else "abort"

    def close(self) -> None:
        """Give up what has not ended; closing twice is closing once."""
        left, self._open = list(self._open), {}
        self._news = []
        if left:
            self._abandon(left)
        self._wake.set()

    # -- for the engine

    def tell(self, id: str, delta: Delta, weight: int = 1) -> None:
        """One more piece of news of the request ``id``."""
        place = self._open.get(id)
        if place is None:
            return
        self._news.append(News(place, delta))
        self._behind += weight
        if delta.answer.finished:
            del self._open[id]
        elif self._behind > BEHIND:
            self.fail(TooSlow("the client does not read its answer; the request was given up"))
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come."""
        if self._error is None:
            self._error = error
        left, self._open = list(self._open), {}
        if left:
            self._abandon(left)
        self._wake.set()
