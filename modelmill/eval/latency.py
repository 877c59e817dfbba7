"""Time to first token and time per output token at one batch size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import CapacityError, ModelmillError
from modelmill.core.progress_callback import Progress
from modelmill.eval.bench_targets import BenchTarget, TargetRun
from modelmill.eval.datasets import random_requests
from modelmill.eval.report import BenchResult, MeasurementStats


@dataclass(frozen=True)
class LatencyShape:
    """Workload of random ids.

    Attributes:
        batch: prompts at once.
        input: ids of each.
        output: tokens of each answer.
    """

    batch: int
    input: int
    output: int


@dataclass(frozen=True)
class Latency(BenchResult):
    """Latency of one target at one shape: milliseconds, and tokens per second of the whole batch.

    per_token_ms: mean time per token after the first, averaged over the answers of a run.
    output_tokens_per_s: the tokens that came after every answer had its first token, over the time
    they took. If prompts need several steps, early answers decode while late ones wait; those
    tokens are not counted.
    """

    subject: str
    shape: LatencyShape
    first_token_ms: MeasurementStats
    per_token_ms: MeasurementStats | None
    total_ms: MeasurementStats
    input_tokens_per_s: MeasurementStats
    output_tokens_per_s: MeasurementStats | None


def measure_latency(
    targets: Sequence[BenchTarget],
    shape: LatencyShape,
    vocab: int,
    *,
    runs: int = 5,
    warmup: int = 1,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> list[Latency]:
    """Measure every target at one shape, in turn, on the same ids.

    Every run has new ids, so that the prefix cache has no hits.

    Raises:
        CapacityError: if the shape does not fit in memory.
    """
    passes: dict[str, list[TargetRun]] = {target.name: [] for target in targets}
    for target in targets:
        reason = target.capacity_problem(shape.batch, shape.input + shape.output)
        if reason is not None:
            raise CapacityError(reason)
    for number in range(-warmup, runs):
        requests = random_requests(
            [(shape.input, shape.output)] * shape.batch, vocab, seed + 1000 + number
        )
        for target in targets:
            result = _run_or_raise_capacity_error(target, requests, shape)
            if number >= 0:
                passes[target.name].append(result)
        if on_progress is not None:
            on_progress(f"batch {shape.batch}", number + warmup + 1, runs + warmup)
    return [_summarize_latency(name, shape, results) for name, results in passes.items()]


def _run_or_raise_capacity_error(
    target: BenchTarget, requests: Any, shape: LatencyShape
) -> TargetRun:
    import torch

    try:
        return target.run(requests)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except MemoryError:
        pass
    raise CapacityError(
        f"{target.name} ran out of memory at {shape.batch} × {shape.input + shape.output} tokens"
    )


def _summarize_latency(name: str, shape: LatencyShape, passes: Sequence[TargetRun]) -> Latency:
    first = MeasurementStats.from_values([each.first_token_seconds for each in passes])
    per_token = output = None
    if shape.output > 1:
        per_token = MeasurementStats.from_values(
            [statistics.fmean(each.seconds_per_token) for each in passes]
        )
        output = MeasurementStats.from_values(
            [(each.total_seconds - each.first_token_seconds) / each.later_tokens for each in passes]
        ).to_rate(1)
    return Latency(
        subject=name,
        shape=shape,
        first_token_ms=first.scaled(1e3),
        per_token_ms=None if per_token is None else per_token.scaled(1e3),
        total_ms=MeasurementStats.from_values([each.total_seconds for each in passes]).scaled(1e3),
        input_tokens_per_s=first.to_rate(shape.batch * shape.input),
        output_tokens_per_s=output,
    )


@dataclass(frozen=True)
class LatencySweepResult:
    """Latencies of the measured batch sizes, and why the next size was not measured."""

    results: list[Latency]
    stop_reason: str | None


def sweep_shapes(
    targets: Sequence[BenchTarget], shapes: Sequence[LatencyShape], vocab: int, **options: Any
) -> LatencySweepResult:
    """Run ``measure_latency`` at each shape until memory is exhausted.

    Raises the error if the first shape fails.
    """
    results: list[Latency] = []
    for shape in shapes:
        try:
            results.extend(measure_latency(targets, shape, vocab, **options))
        except ModelmillError as error:
            if not isinstance(error, CapacityError) or not results:
                raise
            return LatencySweepResult(results, f"batch {shape.batch}: {error}")
    return LatencySweepResult(results, None)
