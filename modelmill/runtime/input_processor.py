"""What a request becomes: sequences with their limit, seed and guide, queued in an order of
service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from modelmill.core.errors import RequestError
from modelmill.core.types import Guide, Request
from modelmill.runtime import counter_rng
from modelmill.runtime.beam_search import BeamSearch
from modelmill.runtime.output_processor import OutputProcessor
from modelmill.runtime.request_limits import RequestLimits, check_request
from modelmill.runtime.sequence import RopeRule, Sequence
from modelmill.runtime.vision_runner import VisionEncoderRunner


class InputProcessor:
    """Numbers requests as they come: the order of service and the random numbers follow from that.

    guide_factory: what makes a guide of a request's grammar, given by who opens an engine; None: no
    structured output."""

    def __init__(
        self,
        output_processor: OutputProcessor,
        vision_runner: VisionEncoderRunner,
        rope_rule: RopeRule,
        limits: RequestLimits,
        *,
        seed: int,
        digest: str,
    ) -> None:
        """seed: of requests without one. digest: identifies the weights in prefix keys."""
        self._output_processor, self._vision_runner, self._rope_rule, self._limits = (
            output_processor,
            vision_runner,
            rope_rule,
            limits,
        )
        self._seed, self._digest = seed, digest
        self._num_arrivals = 0
        self.guide_factory: Callable[[Request], Guide] | None = None

    def add(self, request: Request) -> None:
        """As ``EngineCore.add``."""
        self._enqueue(self._embed_images([request])[0], self._num_arrivals, self._num_arrivals)
        self._num_arrivals += 1

    def add_all(self, requests: Iterable[Request]) -> None:
        """As ``EngineCore.add_all``."""
        listed = self._embed_images(list(requests))
        first = self._num_arrivals
        self._num_arrivals += len(listed)
        # stable: answers of the same bound keep the order in which they were given
        by_length = sorted(range(len(listed)), key=lambda i: -self._max_output_tokens(listed[i]))
        for place, i in enumerate(by_length):
            self._enqueue(listed[i], first + place, first + i)

    def _embed_images(self, requests: list[Request]) -> list[Request]:
        """Requests whose pictures have become embeddings."""
        return (
            self._vision_runner.embed_images(requests)
            if any(request.embedding_spans for request in requests)
            else requests
        )

    def _max_output_tokens(self, request: Request) -> int:
        """Tokens that the answer may have."""
        left = self._limits.max_len - len(request.prompt)
        allowed = request.params.max_tokens
        return left if allowed is None else min(allowed, left)

    def _enqueue(self, request: Request, arrival: int, number: int) -> None:
        """arrival: its place in the order of service.

        number: what its random numbers follow from.
        """
        params = request.params.with_defaults({})
        if params is not request.params:
            request = replace(request, params=params)
        if request.id in self._output_processor.live_sequences:
            raise RequestError(f"request id {request.id!r} is already running; choose another")
        ids = check_request(request, self._limits)
        limit = len(request.prompt) + self._max_output_tokens(request)
        seed = counter_rng.derive_seed(self._seed, number) if params.seed is None else params.seed
        searches = params.num_beams > 1 and limit > len(request.prompt)
        seqs = [
            Sequence(
                request,
                i,
                arrival,
                self._rope_rule,
                ids,
                max_length=limit,
                seed=_sequence_seed(seed, i),
                model_digest=self._digest,
            )
            for i in range(1 if searches else params.n)
        ]
        if request.grammar is not None:
            self._attach_guides(request, seqs)
        leader = seqs[0]
        leader.siblings = seqs[1:]
        if searches:
            leader.beam_search = BeamSearch(leader)
            leader.siblings = leader.beam_search.seqs
        self._output_processor.add(seqs)

    def _attach_guides(self, request: Request, seqs: list[Sequence]) -> None:
        """A guide for each sequence of a request with a grammar."""
        if self.guide_factory is None:
            raise RequestError("this engine was opened without structured output")
        if request.params.num_beams > 1:
            raise RequestError("structured output is not offered for beams; use num_beams=1")
        for seq in seqs:
            seq.guide = self.guide_factory(request)


def _sequence_seed(seed: int, index: int) -> int:
    """The seed of one of n sequences; the first has the request's own."""
    return seed & ((1 << 64) - 1) if index == 0 else counter_rng.derive_seed(seed, index)
