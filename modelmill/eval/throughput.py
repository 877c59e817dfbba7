"""Tokens and requests per second over many requests that arrive at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from modelmill.eval.report import Spread
from modelmill.eval.subjects import Pass, Progress, Subject
from modelmill.eval.texts import Work


@dataclass(frozen=True)
class Throughput:
    """One subject over one set of requests. Input and output tokens per second are kept apart."""

    subject: str
    requests: int
    input_tokens: int
    output_tokens: int
    seconds: Spread
    requests_per_s: Spread
    input_tokens_per_s: Spread
    output_tokens_per_s: Spread
    first_token_ms: Spread

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def measure(
    subjects: Sequence[Subject],
    work: Sequence[Work],
    *,
    runs: int = 3,
    warmup: int = 1,
    progress: Progress | None = None,
) -> list[Throughput]:
    """Serve all of ``work`` at once, ``runs`` times, the subjects taking turns.

    first_token_ms is over the requests of the last run, the rest over the runs. A warm-up takes a few requests.
    """
    passes: dict[str, list[Pass]] = {subject.name: [] for subject in subjects}
    if warmup:
        for subject in subjects:
            subject.warm_up(len(work))
    for number in range(-warmup, runs):
        for subject in subjects:
            found = subject.run(work[:4] if number < 0 else work, progress)
            if number >= 0:
                passes[subject.name].append(found)
    return [_summary(name, len(work), found) for name, found in passes.items()]


def _summary(name: str, requests: int, passes: Sequence[Pass]) -> Throughput:
    seconds = Spread.of([each.total for each in passes])
    last = passes[-1]
    return Throughput(
        subject=name,
        requests=requests,
        input_tokens=last.input_tokens,
        output_tokens=last.output_tokens,
        seconds=seconds,
        requests_per_s=seconds.inverse(requests),
        input_tokens_per_s=seconds.inverse(last.input_tokens),
        output_tokens_per_s=seconds.inverse(last.output_tokens),
        first_token_ms=Spread.of(last.firsts).scaled(1e3),
    )
