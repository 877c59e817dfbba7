"""Weighted fair queueing: in which order the requests of several keys start.

Start-time fair queueing: every request has a virtual start time, and the engine starts the lowest
first. It is where the key's previous request ends in virtual time, which advances by tokens over
weight; but not before the virtual time of the latest request that has started, so that an idle key
saves nothing up. Requests of one key keep their order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

MAX_EXPECTED_OUTPUT = 512
"""Output tokens that a request counts at first, if it may write more. It counts what it wrote when
it has ended.
"""


@dataclass(frozen=True)
class TokenCharge:
    """What a request counts for its key until it has ended.

    Attributes:
        flow: the key.
        weight: of the key.
        tokens: expected, of prompts and outputs.
        start: its virtual start time.
    """

    flow: str
    weight: float
    tokens: int
    start: float


class FairQueueClock:
    """The virtual time of one engine; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0.0
        self._finish: dict[str, float] = {}
        self._last_start: dict[str, float] = {}

    def assign_virtual_start(self, flow: str, weight: float, tokens: int) -> TokenCharge:
        """Give a request of a key its virtual start time.

        Args:
            flow: the key.
            weight: of the key; twice the weight is twice the tokens.
            tokens: that the request is expected to take.
        """
        with self._lock:
            start = max(self._now, self._finish.get(flow, 0.0), self._last_start.get(flow, 0.0))
            self._last_start[flow] = start
            self._finish[flow] = start + tokens / weight
            return TokenCharge(flow, weight, tokens, start)

    def advance_virtual_time(self, start: float) -> None:
        """Advance the virtual time: a request with this start time has started."""
        with self._lock:
            self._now = max(self._now, start)

    def settle_charge(self, charge: TokenCharge, tokens: int) -> None:
        """Count what a request took instead of what was expected.

        Args:
            charge: of the request, which has ended.
            tokens: of its prompts and outputs; 0: it never started.
        """
        with self._lock:
            self._finish[charge.flow] += (tokens - charge.tokens) / charge.weight
