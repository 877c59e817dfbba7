"""Benchmark targets: an engine or transformers behind one interface."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from modelmill.core.errors import CapacityError
from modelmill.core.progress_callback import Progress
from modelmill.core.types import FinishReason, Request, SamplingParams
from modelmill.eval.datasets import BenchRequest


@dataclass(frozen=True)
class TargetRun:
    """One measured pass over some requests, in seconds since all of them were submitted.

    first_token_seconds: until every request had its first token. all_first_token_seconds: time to
    first token of each request. total_seconds: until all requests had ended. seconds_per_token: of
    each answer with several tokens, the mean time per token after the first. later_tokens: tokens
    generated after ``first_token_seconds``; requests that began earlier may have generated others
    before.
    """

    first_token_seconds: float
    total_seconds: float
    all_first_token_seconds: tuple[float, ...]
    seconds_per_token: tuple[float, ...]
    later_tokens: int
    input_tokens: int
    output_tokens: int


class BenchTarget(Protocol):
    """Something that generates greedily and ignores end-of-text tokens."""

    name: str
    device: str

    def warm_up(self, max_requests: int) -> None:
        """Do all one-time work for up to ``max_requests`` concurrent requests."""

    def run(
        self, workload: Sequence[BenchRequest], on_progress: Progress | None = None
    ) -> TargetRun:
        """Submit all requests at once and run until they have ended."""

    def capacity_problem(self, batch: int, length: int) -> str | None:
        """Say why ``batch`` sequences of ``length`` tokens do not fit together; None if they do."""


class EngineTarget:
    """An engine core: token ids in, token ids out."""

    def __init__(self, engine_core: Any, name: str = "modelmill") -> None:
        self.engine_core = engine_core
        self.name = name
        self.device = str(engine_core.device)
        self._count = itertools.count()

    def warm_up(self, max_requests: int) -> None:
        """Capture CUDA graphs and compile kernels."""
        self.engine_core.warm_up(max_requests)

    def run(
        self, workload: Sequence[BenchRequest], on_progress: Progress | None = None
    ) -> TargetRun:
        """Submit all requests at once and step until the last one has ended."""
        began = time.perf_counter()
        requests = [
            greedy_request(f"bench-{next(self._count)}", each.prompt, each.output)
            for each in workload
        ]
        request_ids = [request.id for request in requests]
        self.engine_core.add_all(requests)
        firsts: dict[str, float] = {}
        lasts: dict[str, float] = {}
        early = tokens = finished = 0
        try:
            while finished < len(workload):
                outputs = self.engine_core.step()
                now = time.perf_counter() - began
                for token in outputs:
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
                for request_id in request_ids:
                    self.engine_core.abort(request_id)
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
        """Say why the KV cache cannot hold the batch at once; None if it can.

        A batch of which requests wait or are preempted would not be a batch of that size.
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
        pages = self.engine_core.scheduler.limits.max_batch_pages(batch, length)
        if pages > self.engine_core.num_pages:
            capacity = self.engine_core.request_limits.kv_tokens
            return f"{batch} × {length} tokens do not fit: the KV cache holds {capacity} tokens"
        return None


class HfTarget:
    """The generate() of transformers, in static batches of at most ``batch``."""

    def __init__(self, reference: Any, batch: int, name: str = "transformers") -> None:
        self.reference = reference
        self.batch = batch
        self.name = name
        self.device = str(reference.device)

    def warm_up(self, max_requests: int) -> None:
        """Do nothing: transformers needs no warm-up."""

    def run(
        self, workload: Sequence[BenchRequest], on_progress: Progress | None = None
    ) -> TargetRun:
        """Run batch by batch.

        A batch runs to its longest output; only the tokens that each request wants are counted.
        """
        began = time.perf_counter()
        token_times: list[list[float]] = []
        for start in range(0, len(workload), self.batch):
            part = workload[start : start + self.batch]
            batch_start = time.perf_counter() - began
            _, times = self.reference.generate(
                [each.prompt for each in part], max(each.output for each in part)
            )
            token_times.extend(
                [batch_start + when for when in times[: each.output]] for each in part
            )
            if on_progress is not None:
                on_progress(self.name, start + len(part), len(workload))
        total = time.perf_counter() - began
        firsts = tuple(times[0] for times in token_times)
        per_token = tuple(
            (times[-1] - times[0]) / (len(times) - 1) for times in token_times if len(times) > 1
        )
        first = max(firsts)
        later = sum(when > first for times in token_times for when in times)
        inputs = sum(len(each.prompt) for each in workload)
        outputs = sum(each.output for each in workload)
        return TargetRun(first, total, firsts, per_token, later, inputs, outputs)

    def capacity_problem(self, batch: int, length: int) -> str | None:  # noqa: ARG002
        """Return None: transformers allocates while it runs, so the batch is tried."""
        return None


class EngineScorer:
    """Log probabilities of an engine, for perplexity; several windows are in flight."""

    def __init__(self, engine_core: Any, max_in_flight: int = 8) -> None:
        self.engine_core = engine_core
        self.max_in_flight = max_in_flight
        self._count = itertools.count()

    def score(self, windows: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """Yield log probabilities (natural) in window order.

        A window of T ids has T - 1 values: those of ids[1:].
        """
        for start in range(0, len(windows), self.max_in_flight):
            yield from self._score_concurrently(windows[start : start + self.max_in_flight])

    def _score_concurrently(self, windows: Sequence[Sequence[int]]) -> list[list[float]]:
        params = SamplingParams(
            max_tokens=0, temperature=0.0, prompt_logprobs=0, ignore_eos=True
        ).with_defaults({})
        running: dict[str, Sequence[int]] = {}
        logprobs: dict[str, list[float]] = {}
        for window in windows:
            request = Request(id=f"score-{next(self._count)}", prompt=tuple(window), params=params)
            running[request.id] = window
            self.engine_core.add(request)
        ended = 0
        try:
            while ended < len(running):
                for token in self.engine_core.step():
                    if token.prompt_logprobs is not None:
                        logprobs[token.request_id] = _prompt_token_logprobs(
                            token.prompt_logprobs, running[token.request_id]
                        )
                    if token.finish_reason is FinishReason.ABORT:
                        raise CapacityError("a window does not fit in memory; lower --max-length")
                    ended += token.finish_reason is not None
        finally:
            if ended < len(running):
                for id in running:
                    self.engine_core.abort(id)
        return [logprobs[id] for id in running]


def _prompt_token_logprobs(logprobs: Sequence[Any], window: Sequence[int]) -> list[float]:
    """Select the prompt tokens' own log probabilities; the first token has none."""
    return [float(entry[id].logprob) for entry, id in zip(logprobs[1:], window[1:], strict=True)]


def greedy_request(id: str, prompt: Sequence[int], output: int) -> Request:
    """Make a greedy request that generates exactly ``output`` tokens."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True).with_defaults({})
    return Request(id=id, prompt=tuple(prompt), params=params)
