"""What a benchmark measures: an engine's loop, or transformers, behind one small interface."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from modelmill.core.errors import CapacityError
from modelmill.core.types import FinishReason, Request, SamplingParams
from modelmill.eval.datasets import BenchRequest

ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TargetRun:
    """One measured pass over some requests. Seconds by the host's clock, since all were handed in.

    first_token_seconds: until every request had its first token. all_first_token_seconds: the same
    for each. total_seconds: until all had ended. seconds_per_token: between an answer's first and
    last token, by its tokens after the first, of each answer with such. later_tokens: of all
    answers, those that came after ``first_token_seconds``; others may have gone on while some had
    to wait.
    """

    first_token_seconds: float
    total_seconds: float
    all_first_token_seconds: tuple[float, ...]
    seconds_per_token: tuple[float, ...]
    later_tokens: int
    input_tokens: int
    output_tokens: int


class BenchTarget(Protocol):
    """Something that generates greedily, end-of-text ignored."""

    name: str
    device: str

    def warm_up(self, max_requests: int) -> None:
        """Do now what is done once, for up to ``max_requests`` requests at a time."""

    def run(
        self, workload: Sequence[BenchRequest], on_progress: ProgressCallback | None = None
    ) -> TargetRun:
        """Serve all requests, handed in at once."""

    def capacity_problem(self, batch: int, length: int) -> str | None:
        """None where ``batch`` sequences of ``length`` tokens can be computed together, else why
        not.
        """


class EngineTarget:
    """An engine through its loop: ids in, ids out."""

    def __init__(self, engine_core: Any, name: str = "modelmill") -> None:
        self.engine_core = engine_core
        self.name = name
        self.device = str(engine_core.device)
        self._count = itertools.count()

    def warm_up(self, max_requests: int) -> None:
        """Record graphs and compile kernels."""
        self.engine_core.warm_up(max_requests)

    def run(
        self, workload: Sequence[BenchRequest], on_progress: ProgressCallback | None = None
    ) -> TargetRun:
        """Hand in all requests at once and step until the last has ended."""
        began = time.perf_counter()
        requests = [
            greedy_request(f"bench-{next(self._count)}", each.prompt, each.output)
            for each in workload
        ]
        waiting = [request.id for request in requests]
        self.engine_core.add_all(requests)
        firsts: dict[str, float] = {}
        lasts: dict[str, float] = {}
        early = tokens = finished = 0
        try:
            while finished < len(workload):
                news = self.engine_core.step()
                now = time.perf_counter() - began
                for token in news:
                    if token.token_id is not None:
                        tokens += 1
                        firsts.setdefault(token.request_id, now)
                        lasts[token.request_id] = now
                    if token.finish_reason is FinishReason.ABORT:
                        raise CapacityError(
                            f"{self.name} ran out of memory with {len(workload)} requests"
                        )
                    if token.finish_reason is not None:
                        finished += 1
                        if on_progress is not None:
                            on_progress(self.name, finished, len(workload))
                if not early and len(firsts) == len(workload):
                    early = tokens
        finally:
            if finished < len(workload):
                for id in waiting:
                    self.engine_core.abort(id)
        total = time.perf_counter() - began
        times = tuple(firsts.values())
        pairs = (
            (firsts[request.id], lasts[request.id], each.output)
            for request, each in zip(requests, workload)
        )
        per_token = tuple(
            (last - first) / (output - 1) for first, last, output in pairs if output > 1
        )
        inputs = sum(len(each.prompt) for each in workload)
        return TargetRun(max(times), total, times, per_token, tokens - early, inputs, tokens)

    def capacity_problem(self, batch: int, length: int) -> str | None:
        """Whether the KV cache holds them all: a batch that must wait or be preempted is no batch
        of that size.
        """
        if length > self.engine_core.max_model_len:
            return (
                f"{length} tokens are more than the engine's {self.engine_core.max_model_len}; "
                "lower --input-len or --output-len"
            )
        if batch > self.engine_core.config.max_num_seqs:
            return (
                f"{batch} sequences are more than --max-num-seqs "
                f"{self.engine_core.config.max_num_seqs}"
            )
        pages = batch * -(-length // self.engine_core.page_size)
        if pages > self.engine_core.num_pages:
            held = self.engine_core.num_pages * self.engine_core.page_size
            return f"{batch} × {length} tokens do not fit: the KV cache holds {held} tokens"
        return None


class HfTarget:
    """transformers' generate(), in static batches of at most ``batch``."""

    def __init__(self, reference: Any, batch: int, name: str = "transformers") -> None:
        self.reference = reference
        self.batch = batch
        self.name = name
        self.device = str(reference.device)

    def warm_up(self, max_requests: int) -> None:
        """transformers has nothing to prepare."""

    def run(
        self, workload: Sequence[BenchRequest], on_progress: ProgressCallback | None = None
    ) -> TargetRun:
        """Batch by batch; a batch runs to its longest output, and only the tokens asked for are
        counted.
        """
        began = time.perf_counter()
        came: list[list[float]] = []
        for start in range(0, len(workload), self.batch):
            part = workload[start : start + self.batch]
            before = time.perf_counter() - began
            _, times = self.reference.generate(
                [each.prompt for each in part], max(each.output for each in part)
            )
            came.extend([before + when for when in times[: each.output]] for each in part)
            if on_progress is not None:
                on_progress(self.name, start + len(part), len(workload))
        total = time.perf_counter() - began
        firsts = tuple(times[0] for times in came)
        per_token = tuple(
            (times[-1] - times[0]) / (len(times) - 1) for times in came if len(times) > 1
        )
        first = max(firsts)
        later = sum(when > first for times in came for when in times)
        inputs = sum(len(each.prompt) for each in workload)
        outputs = sum(each.output for each in workload)
        return TargetRun(first, total, firsts, per_token, later, inputs, outputs)

    def capacity_problem(self, batch: int, length: int) -> str | None:  # noqa: ARG002
        """transformers allocates as it goes: it is tried."""
        return None


class EngineScorer:
    """Log probabilities of an engine, for perplexity: windows are computed through its loop,
    several in flight.
    """

    def __init__(self, engine_core: Any, max_in_flight: int = 8) -> None:
        self.engine_core = engine_core
        self.max_in_flight = max_in_flight
        self._count = itertools.count()

    def score(self, windows: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """For each window of T ids, in order, the T - 1 natural-log probabilities of ids[1:]."""
        for start in range(0, len(windows), self.max_in_flight):
            yield from self._score_together(windows[start : start + self.max_in_flight])

    def _score_together(self, windows: Sequence[Sequence[int]]) -> list[list[float]]:
        params = SamplingParams(
            max_tokens=0, temperature=0.0, prompt_logprobs=0, ignore_eos=True
        ).with_defaults({})
        running: dict[str, Sequence[int]] = {}
        found: dict[str, list[float]] = {}
        for window in windows:
            request = Request(id=f"score-{next(self._count)}", prompt=tuple(window), params=params)
            running[request.id] = window
            self.engine_core.add(request)
        ended = 0
        try:
            while ended < len(running):
                for token in self.engine_core.step():
                    if token.prompt_logprobs is not None:
                        found[token.request_id] = _own_logprobs(
                            token.prompt_logprobs, running[token.request_id]
                        )
                    if token.finish_reason is FinishReason.ABORT:
                        raise CapacityError("a window does not fit the memory; lower --max-length")
                    ended += token.finish_reason is not None
        finally:
            if ended < len(running):
                for id in running:
                    self.engine_core.abort(id)
        return [found[id] for id in running]


def _own_logprobs(logprobs: Sequence[Any], window: Sequence[int]) -> list[float]:
    """The tokens' own values of a request's prompt_logprobs (the first token has none)."""
    return [float(entry[id].logprob) for entry, id in zip(logprobs[1:], window[1:], strict=True)]


def greedy_request(id: str, prompt: Sequence[int], output: int) -> Request:
    """A request that gives exactly ``output`` tokens, greedily."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True).with_defaults({})
    return Request(id=id, prompt=tuple(prompt), params=params)
