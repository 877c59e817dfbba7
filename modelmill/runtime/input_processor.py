"""Turns requests into sequences with limit, seed and guide, and queues them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from modelmill.core.errors import RequestError
from modelmill.core.types import Guide, ImageEmbeddingSpan, Request, SamplingParams
from modelmill.runtime.beam_search import BeamSearch
from modelmill.runtime.output_processor import OutputProcessor
from modelmill.runtime.sampler import derive_seed
from modelmill.runtime.sequence import (
    RequestLimits,
    RopeFrequencyRule,
    Sequence,
    check_request_and_get_ids,
)
from modelmill.vision.encoder_runner import VisionEncoderRunner

MakeGuide = Callable[[Request], Guide]
"""Makes the guide of one sequence of a request with a grammar."""


class InputProcessor:
    """Numbers requests in order of arrival, which sets their priority and random numbers."""

    def __init__(
        self,
        output_processor: OutputProcessor,
        vision_runner: VisionEncoderRunner,
        rope_length_source: RopeFrequencyRule,
        limits: RequestLimits,
        *,
        seed: int,
        digest: str,
    ) -> None:
        """Store what sequences are made with.

        Args:
            output_processor: Takes the sequences.
            vision_runner: Computes image embeddings.
            rope_length_source: Of the model.
            limits: Requests beyond them are refused.
            seed: For requests without one.
            digest: Identifies the weights in prefix cache keys.
        """
        self._output_processor = output_processor
        self._vision_runner = vision_runner
        self._rope_rule = rope_length_source
        self._limits = limits
        self._seed, self._digest = seed, digest
        self._num_arrivals = 0

    def add(self, request: Request, make_guide: MakeGuide | None = None) -> None:
        """Queue a request; see ``EngineCore.add``."""
        number = self._num_arrivals
        self._enqueue(self._embed_images([request])[0], number, number, make_guide)
        self._num_arrivals += 1

    def add_all(self, requests: Iterable[Request], make_guide: MakeGuide | None = None) -> None:
        """Queue a batch of requests; see ``EngineCore.add_all``."""
        batch = self._embed_images(list(requests))
        first = self._num_arrivals
        self._num_arrivals += len(batch)
        # a stable sort: requests with equal limits keep their order
        by_length = sorted(range(len(batch)), key=lambda i: -self._max_output_tokens(batch[i]))
        for rank, i in enumerate(by_length):
            self._enqueue(batch[i], first + rank, first + i, make_guide)

    def prompt_page_keys(
        self,
        tokens: Seq[int],
        cache_salt: str,
        page_size: int,
        spans: Seq[ImageEmbeddingSpan] = (),
    ) -> list[bytes]:
        """Keys in the prefix cache of the full pages of a prompt, which is not queued."""
        request = Request(
            id="",
            prompt=tuple(tokens),
            params=SamplingParams(),
            cache_salt=cache_salt,
            embedding_spans=tuple(spans),
        )
        seq = Sequence(
            request, 0, 0, self._rope_rule, max_length=len(tokens), model_digest=self._digest
        )
        return [seq.page_key(page, page_size) for page in range(len(tokens) // page_size)]

    def _embed_images(self, requests: list[Request]) -> list[Request]:
        """Replace the pixels of embedding spans by embeddings."""
        return (
            self._vision_runner.replace_images_with_embeddings(requests)
            if any(request.embedding_spans for request in requests)
            else requests
        )

    def _max_output_tokens(self, request: Request) -> int:
        """Most output tokens of a request."""
        left = self._limits.max_len - len(request.prompt)
        allowed = request.params.max_tokens
        return left if allowed is None else min(allowed, left)

    def _enqueue(
        self, request: Request, arrival: int, number: int, make_guide: MakeGuide | None
    ) -> None:
        """Queue one request; ``arrival`` sets its priority, ``number`` its default seed."""
        params = request.params.with_defaults({})
        if params is not request.params:
            request = replace(request, params=params)
        if request.id in self._output_processor.live_sequences:
            raise RequestError(f"request id {request.id!r} is already running; choose another")
        ids = check_request_and_get_ids(request, self._limits)
        limit = len(request.prompt) + self._max_output_tokens(request)
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        searches = params.num_beams > 1 and limit > len(request.prompt)
        guides = _make_guides(request, 1 if searches else params.n, make_guide)
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
                guide=guide,
            )
            for i, guide in enumerate(guides)
        ]
        leader = seqs[0]
        if searches:
            search = BeamSearch(leader)
            leader.begin_beam_search(search, search.seqs)
        else:
            leader.set_siblings(seqs[1:])
        self._output_processor.add(seqs)


def _make_guides(request: Request, count: int, make_guide: MakeGuide | None) -> Seq[Guide | None]:
    """A guide for each of ``count`` sequences; None without a grammar."""
    if request.grammar is None:
        return [None] * count
    if make_guide is None:
        raise RequestError("this engine was opened without structured output")
    if request.params.num_beams > 1:
        raise RequestError("structured output does not support beam search; use num_beams=1")
    return [make_guide(request) for _ in range(count)]


def _sequence_seed(seed: int, index: int) -> int:
    """The seed of one of n sequences; the first has the request's own."""
    return seed & ((1 << 64) - 1) if index == 0 else derive_seed(seed, index)
