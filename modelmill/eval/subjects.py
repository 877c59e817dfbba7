"""What a benchmark measures: an engine's loop, or transformers, behind one small interface."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from modelmill.core.errors import CapacityError
from modelmill.core.types import Finish, Request, SamplingParams
from modelmill.eval.texts import Work

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Pass:
    """One measured pass over some requests. Seconds by the host's clock, since all were handed in.

    first: until every request had its first token. firsts: the same for each. total: until all had ended.
    per_token: between an answer's first and last token, by its tokens after the first, of each answer with such.
    later_tokens: of all answers, those that came after ``first``; others may have gone on while some had to wait.
    """

    first: float
    total: float
    firsts: tuple[float, ...]
    per_token: tuple[float, ...]
    later_tokens: int
    input_tokens: int
    output_tokens: int


class Subject(Protocol):
    """Something that generates greedily, end-of-text ignored."""

    name: str
    device: str

    def warm_up(self, largest: int) -> None:
        """Do now what is done once, for up to ``largest`` requests at a time."""

    def run(self, work: Sequence[Work], progress: Progress | None = None) -> Pass:
        """Serve all requests, handed in at once."""

    def room(self, batch: int, length: int) -> str | None:
        """None where ``batch`` sequences of ``length`` tokens can be computed together, else why not."""


class EngineSubject:
    """An engine through its loop: ids in, ids out."""

    def __init__(self, loop: Any, name: str = "modelmill") -> None:
        self.loop = loop
        self.name = name
        self.device = str(loop.device)
        self._count = itertools.count()

    def warm_up(self, largest: int) -> None:
        """Record graphs and compile kernels."""
        self.loop.warm_up(largest)

    def run(self, work: Sequence[Work], progress: Progress | None = None) -> Pass:
        """Hand in all requests at once and step until the last has ended."""
        began = time.perf_counter()
        requests = [greedy_request(f"bench-{next(self._count)}", each.prompt, each.output) for each in work]
        waiting = [request.id for request in requests]
        self.loop.add_all(requests)
        firsts: dict[str, float] = {}
        lasts: dict[str, float] = {}
        early = tokens = finished = 0
        try:
            while finished < len(work):
                news = self.loop.step()
                now = time.perf_counter() - began
                for token in news:
                    if token.id is not None:
                        tokens += 1
                        firsts.setdefault(token.request, now)
                        lasts[token.request] = now
                    if token.finish is Finish.ABORT:
                        raise CapacityError(f"{self.name} ran out of memory with {len(work)} requests")
                    if token.finish is not None:
                        finished += 1
                        if progress is not None:
                            progress(self.name, finished, len(work))
                if not early and len(firsts) == len(work):
                    early = tokens
        finally:
            if finished < len(work):
                for id in waiting:
                    self.loop.abort(id)
        total = time.perf_counter() - began
        times = tuple(firsts.values())
        pairs = ((firsts[request.id], lasts[request.id], each.output) for request, each in zip(requests, work))
        per_token = tuple((last - first) / (output - 1) for first, last, output in pairs if output > 1)
        inputs = sum(len(each.prompt) for each in work)
        return Pass(max(times), total, times, per_token, tokens - early, inputs, tokens)

    def room(self, batch: int, length: int) -> str | None:
        """Whether the KV cache holds them all: a batch that must wait or be preempted is no batch of that size."""
        if length > self.loop.max_model_len:
            return (
                f"{length} tokens are more than the engine's {self.loop.max_model_len}; "
                "lower --input-len or --output-len"
            )
        if batch > self.loop.config.max_num_seqs:
            return f"{batch} sequences are more than --max-num-seqs {self.loop.config.max_num_seqs}"
        pages = batch * -(-length // self.loop.page_size)
        if pages > self.loop.num_pages:
            held = self.loop.num_pages * self.loop.page_size
            return f"{batch} × {length} tokens do not fit: the KV cache holds {held} tokens"
        return None


class HfSubject:
    """transformers' generate(), in static batches of at most ``batch``."""

    def __init__(self, reference: Any, batch: int, name: str = "transformers") -> None:
        self.reference = reference
        self.batch = batch
        self.name = name
        self.device = str(reference.device)

    def warm_up(self, largest: int) -> None:
        """transformers has nothing to prepare."""

    def run(self, work: Sequence[Work], progress: Progress | None = None) -> Pass:
        """Batch by batch; a batch runs to its longest output, and only the tokens asked for are counted."""
        began = time.perf_counter()
        came: list[list[float]] = []
        for start in range(0, len(work), self.batch):
            part = work[start : start + self.batch]
            before = time.perf_counter() - began
            _, times = self.reference.generate([each.prompt for each in part], max(each.output for each in part))
            came.extend([before + when for when in times[: each.output]] for each in part)
            if progress is not None:
                progress(self.name, start + len(part), len(work))
        total = time.perf_counter() - began
        firsts = tuple(times[0] for times in came)
        per_token = tuple((times[-1] - times[0]) / (len(times) - 1) for times in came if len(times) > 1)
        first = max(firsts)
        later = sum(when > first for times in came for when in times)
        inputs = sum(len(each.prompt) for each in work)
        outputs = sum(each.output for each in work)
        return Pass(first, total, firsts, per_token, later, inputs, outputs)

    def room(self, batch: int, length: int) -> str | None:  # noqa: ARG002
        """transformers allocates as it goes: it is tried."""
        return None


class EngineScorer:
    """Log probabilities of an engine, for perplexity: windows are computed through its loop, several in flight."""

    def __init__(self, loop: Any, at_once: int = 8) -> None:
        self.loop = loop
        self.at_once = at_once
        self._count = itertools.count()

    def score(self, windows: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """For each window of T ids, in order, the T - 1 natural-log probabilities of ids[1:]."""
        for start in range(0, len(windows), self.at_once):
            yield from self._score_together(windows[start : start + self.at_once])

    def _score_together(self, windows: Sequence[Sequence[int]]) -> list[list[float]]:
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, ignore_eos=True).resolved({})
        running: dict[str, Sequence[int]] = {}
        found: dict[str, list[float]] = {}
        for window in windows:
            request = Request(id=f"score-{next(self._count)}", prompt=tuple(window), params=params)
            running[request.id] = window
            self.loop.add(request)
        ended = 0
        try:
            while ended < len(running):
                for token in self.loop.step():
                    if token.prompt_logprobs is not None:
                        found[token.request] = _values(token.prompt_logprobs, running[token.request])
                    if token.finish is Finish.ABORT:
                        raise CapacityError("a window does not fit the memory; lower --max-length")
                    ended += token.finish is not None
        finally:
            if ended < len(running):
                for id in running:
                    self.loop.abort(id)
        return [found[id] for id in running]


def _values(logprobs: Sequence[Any], window: Sequence[int]) -> list[float]:
    """The tokens' own values of a request's prompt_logprobs (the first token has none)."""
    return [float(entry[id].logprob) for entry, id in zip(logprobs[1:], window[1:], strict=True)]


def greedy_request(id: str, prompt: Sequence[int], output: int) -> Request:
    """A request that gives exactly ``output`` tokens, greedily."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True).resolved({})
    return Request(id=id, prompt=tuple(prompt), params=params)
