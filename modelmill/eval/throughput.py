"""Tokens and requests per second of many requests that arrive at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelmill.core.progress_callback import Progress
from modelmill.eval.bench_targets import BenchTarget, TargetRun
from modelmill.eval.datasets import BenchRequest
from modelmill.eval.report import BenchResult, MeasurementStats


@dataclass(frozen=True)
class Throughput(BenchResult):
    """Throughput of one target over one set of requests, input and output tokens apart."""

    subject: str
    requests: int
    input_tokens: int
    output_tokens: int
    seconds: MeasurementStats
    requests_per_s: MeasurementStats
    input_tokens_per_s: MeasurementStats
    output_tokens_per_s: MeasurementStats
    first_token_ms: MeasurementStats


def measure_throughput(
    targets: Sequence[BenchTarget],
    requests: Sequence[BenchRequest],
    *,
    runs: int = 3,
    warmup: int = 1,
    on_progress: Progress | None = None,
) -> list[Throughput]:
    """Serve all of ``requests`` at once, ``runs`` times, the targets in turn.

    ``first_token_ms`` is over the requests of the last run, the other figures over the runs. A
    warm-up run serves a few requests.
    """
    passes: dict[str, list[TargetRun]] = {target.name: [] for target in targets}
    if warmup:
        for target in targets:
            target.warm_up(len(requests))
    for number in range(-warmup, runs):
        for target in targets:
            result = target.run(requests[:4] if number < 0 else requests, on_progress)
            if number >= 0:
                passes[target.name].append(result)
    return [_summarize_throughput(name, len(requests), result) for name, result in passes.items()]


def _summarize_throughput(name: str, requests: int, passes: Sequence[TargetRun]) -> Throughput:
    seconds = MeasurementStats.from_values([each.total_seconds for each in passes])
    last = passes[-1]
    return Throughput(
        subject=name,
        requests=requests,
        input_tokens=last.input_tokens,
        output_tokens=last.output_tokens,
        seconds=seconds,
        requests_per_s=seconds.to_rate(requests),
        input_tokens_per_s=seconds.to_rate(last.input_tokens),
        output_tokens_per_s=seconds.to_rate(last.output_tokens),
        first_token_ms=MeasurementStats.from_values(last.all_first_token_seconds).scaled(1e3),
    )
