"""First token and time per output token at one batch size, for several subjects in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from modelmill.core.errors import CapacityError, ModelmillError
from modelmill.eval.datasets import random_requests
from modelmill.eval.report import Spread
from modelmill.eval.targets import BenchTarget, ProgressCallback, TargetRun


@dataclass(frozen=True)
class LatencyShape:
    """What is asked: ``batch`` prompts of ``input`` seeded ids, ``output`` tokens each."""

    batch: int
    input: int
    output: int


@dataclass(frozen=True)
class Latency:
    """One subject at one shape. Milliseconds, and tokens per second of the whole batch; output
    apart from input.

    per_token_ms: of a run, the mean over its answers of the time from an answer's first token to
    its last by the tokens between. output_tokens_per_s: the tokens that came after every answer had
    its first, over the time they took. Where prompts need several steps, early answers go on while
    late ones wait: none of that counts as speed after the first."""

    subject: str
    shape: LatencyShape
    first_token_ms: Spread
    per_token_ms: Spread | None
    total_ms: Spread
    input_tokens_per_s: Spread
    output_tokens_per_s: Spread | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def measure_latency(
    targets: Sequence[BenchTarget],
    shape: LatencyShape,
    vocab: int,
    *,
    runs: int = 5,
    warmup: int = 1,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> list[Latency]:
    """Measure each subject at one shape, taking turns run by run, all on the same ids.

    Every run has fresh ids, so that no prefix cache answers. Raises CapacityError where the shape
    does not fit.
    """
    passes: dict[str, list[TargetRun]] = {subject.name: [] for subject in targets}
    for subject in targets:
        reason = subject.capacity_problem(shape.batch, shape.input + shape.output)
        if reason is not None:
            raise CapacityError(reason)
    for number in range(-warmup, runs):
        work = random_requests(
            [(shape.input, shape.output)] * shape.batch, vocab, seed + 1000 + number
        )
        for subject in targets:
            found = _timed_run(subject, work, shape)
            if number >= 0:
                passes[subject.name].append(found)
        if on_progress is not None:
            on_progress(f"batch {shape.batch}", number + warmup + 1, runs + warmup)
    return [_summary(name, shape, found) for name, found in passes.items()]


def _timed_run(target: BenchTarget, work: Any, shape: LatencyShape) -> TargetRun:
    import torch

    try:
        return target.run(work)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except MemoryError:
        pass
    raise CapacityError(
        f"{target.name} ran out of memory at {shape.batch} × {shape.input + shape.output} tokens"
    )


def _summary(name: str, shape: LatencyShape, passes: Sequence[TargetRun]) -> Latency:
    first = Spread.from_values([each.first_token_seconds for each in passes])
    per_token = output = None
    if shape.output > 1:
        per_token = Spread.from_values(
            [statistics.fmean(each.seconds_per_token) for each in passes]
        )
        output = Spread.from_values(
            [(each.total_seconds - each.first_token_seconds) / each.later_tokens for each in passes]
        ).inverse(1)
    return Latency(
        subject=name,
        shape=shape,
        first_token_ms=first.scaled(1e3),
        per_token_ms=None if per_token is None else per_token.scaled(1e3),
        total_ms=Spread.from_values([each.total_seconds for each in passes]).scaled(1e3),
        input_tokens_per_s=first.inverse(shape.batch * shape.input),
        output_tokens_per_s=output,
    )


@dataclass(frozen=True)
class LatencySweep:
    """Batch sizes that were measured, and why the next one was not."""

    results: list[Latency]
    stop_reason: str | None


def sweep_shapes(
    targets: Sequence[BenchTarget], shapes: Sequence[LatencyShape], vocab: int, **how: Any
) -> LatencySweep:
    """``measure`` at each shape until memory ends.

    Raises the first shape's error: then nothing was measured.
    """
    results: list[Latency] = []
    for shape in shapes:
        try:
            results.extend(measure_latency(targets, shape, vocab, **how))
        except ModelmillError as error:
            if not isinstance(error, CapacityError) or not results:
                raise
            return LatencySweep(results, f"batch {shape.batch}: {error}")
    return LatencySweep(results, None)
