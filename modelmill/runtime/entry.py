"""What a request becomes: sequences with their limit, seed and guide, queued in an order of service."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from modelmill.core.errors import RequestError
from modelmill.core.types import Guide, Request
from modelmill.runtime import chance
from modelmill.runtime.beams import BeamSearch
from modelmill.runtime.check import Bounds, check
from modelmill.runtime.eyes import Eyes
from modelmill.runtime.ledger import Ledger
from modelmill.runtime.sequence import RopeRule, Sequence


class Entry:
    """Numbers requests as they come: the order of service and the random numbers follow from that.

    guides: what makes a guide of a request's grammar, given by who opens a loop; None: no structured output.
    """

    def __init__(self, ledger: Ledger, eyes: Eyes, rope: RopeRule, bounds: Bounds, *, seed: int, digest: str) -> None:
        """seed: of requests without one. digest: identifies the weights in prefix keys."""
        self._ledger, self._eyes, self._rope, self._bounds = ledger, eyes, rope, bounds
        self._seed, self._digest = seed, digest
        self._arrivals = 0
        self.guides: Callable[[Request], Guide] | None = None

    def add(self, request: Request) -> None:
        """As ``Loop.add``."""
        self._queue(self._seen([request])[0], self._arrivals, self._arrivals)
        self._arrivals += 1

    def add_all(self, requests: Iterable[Request]) -> None:
        """As ``Loop.add_all``."""
        listed = self._seen(list(requests))
        first = self._arrivals
        self._arrivals += len(listed)
        # stable: answers of the same bound keep the order in which they were given
        order = sorted(range(len(listed)), key=lambda i: -self._longest(listed[i]))
        for place, i in enumerate(order):
            self._queue(listed[i], first + place, first + i)

    def _seen(self, requests: list[Request]) -> list[Request]:
        """Requests whose pictures have become embeddings."""
        return self._eyes.see(requests) if any(request.inserts for request in requests) else requests

    def _longest(self, request: Request) -> int:
        """Tokens that the answer may have."""
        left = self._bounds.longest - len(request.prompt)
        allowed = request.params.max_tokens
        return left if allowed is None else min(allowed, left)

    def _queue(self, request: Request, arrival: int, number: int) -> None:
        """arrival: its place in the order of service. number: what its random numbers follow from."""
        params = request.params.resolved({})
        if params is not request.params:
            request = replace(request, params=params)
        if request.id in self._ledger.live:
            raise RequestError(f"request id {request.id!r} is already running; choose another")
        ids = check(request, self._bounds)
        limit = len(request.prompt) + self._longest(request)
        seed = chance.derive(self._seed, number) if params.seed is None else params.seed
        searches = params.num_beams > 1 and limit > len(request.prompt)
        seqs = [
            Sequence(request, i, arrival, self._rope, ids, limit=limit, seed=_stream(seed, i), digest=self._digest)
            for i in range(1 if searches else params.n)
        ]
        if request.grammar is not None:
            self._guide(request, seqs)
        leader = seqs[0]
        leader.siblings = seqs[1:]
        if searches:
            leader.beam = BeamSearch(leader)
            leader.siblings = leader.beam.seqs
        self._ledger.add(seqs)

    def _guide(self, request: Request, seqs: list[Sequence]) -> None:
        """A guide for each sequence of a request with a grammar."""
        if self.guides is None:
            raise RequestError("this engine was opened without structured output")
        if request.params.num_beams > 1:
            raise RequestError("structured output is not offered for beams; use num_beams=1")
        for seq in seqs:
            seq.guide = self.guides(request)


def _stream(seed: int, index: int) -> int:
    """The seed of one of n sequences; the first has the request's own."""
    return seed & ((1 << 64) - 1) if index == 0 else chance.derive(seed, index)
