"""First token and time per output token at one batch size, for several subjects in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from modelmill.core.errors import CapacityError, ModelmillError
from modelmill.eval.report import Spread
from modelmill.eval.subjects import Pass, Progress, Subject
from modelmill.eval.texts import random_work


@dataclass(frozen=True)
class Shape:
    """What is asked: ``batch`` prompts of ``input`` seeded ids, ``output`` tokens each."""

    batch: int
    input: int
    output: int


@dataclass(frozen=True)
class Latency:
    """One subject at one shape. Milliseconds, and tokens per second of the whole batch; output apart from input.

    per_token_ms: of a run, the mean over its answers of the time from an answer's first token to its last by the tokens
    between. output_tokens_per_s: the tokens that came after every answer had its first, over the time they took. Where
    prompts need several steps, early answers go on while late ones wait: none of that counts as speed after the first.
    """

    subject: str
    shape: Shape
    first_token_ms: Spread
    per_token_ms: Spread | None
    total_ms: Spread
    input_tokens_per_s: Spread
    output_tokens_per_s: Spread | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def measure(
    subjects: Sequence[Subject],
    shape: Shape,
    vocab: int,
    *,
    runs: int = 5,
    warmup: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Latency]:
    """Measure each subject at one shape, taking turns run by run, all on the same ids.

    Every run has fresh ids, so that no prefix cache answers. Raises CapacityError where the shape does not fit.
    """
    passes: dict[str, list[Pass]] = {subject.name: [] for subject in subjects}
    for subject in subjects:
        reason = subject.room(shape.batch, shape.input + shape.output)
        if reason is not None:
            raise CapacityError(reason)
    for number in range(-warmup, runs):
        work = random_work([(shape.input, shape.output)] * shape.batch, vocab, seed + 1000 + number)
        for subject in subjects:
            found = _guarded(subject, work, shape)
            if number >= 0:
                passes[subject.name].append(found)
        if progress is not None:
            progress(f"batch {shape.batch}", number + warmup + 1, runs + warmup)
    return [_summary(name, shape, found) for name, found in passes.items()]


def _guarded(subject: Subject, work: Any, shape: Shape) -> Pass:
    import torch

    try:
        return subject.run(work)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except MemoryError:
        pass
    raise CapacityError(f"{subject.name} ran out of memory at {shape.batch} × {shape.input + shape.output} tokens")


def _summary(name: str, shape: Shape, passes: Sequence[Pass]) -> Latency:
    first = Spread.of([each.first for each in passes])
    per_token = output = None
    if shape.output > 1:
        per_token = Spread.of([statistics.fmean(each.per_token) for each in passes])
        output = Spread.of([(each.total - each.first) / each.later_tokens for each in passes]).inverse(1)
    return Latency(
        subject=name,
        shape=shape,
        first_token_ms=first.scaled(1e3),
        per_token_ms=None if per_token is None else per_token.scaled(1e3),
        total_ms=Spread.of([each.total for each in passes]).scaled(1e3),
        input_tokens_per_s=first.inverse(shape.batch * shape.input),
        output_tokens_per_s=output,
    )


@dataclass(frozen=True)
class Sweep:
    """Batch sizes that were measured, and why the next one was not."""

    results: list[Latency]
    ended: str | None


def sweep(subjects: Sequence[Subject], shapes: Sequence[Shape], vocab: int, **how: Any) -> Sweep:
    """``measure`` at each shape until memory ends. Raises the first shape's error: then nothing was measured."""
    results: list[Latency] = []
    for shape in shapes:
        try:
            results.extend(measure(subjects, shape, vocab, **how))
        except ModelmillError as error:
            if not isinstance(error, CapacityError) or not results:
                raise
            return Sweep(results, f"batch {shape.batch}: {error}")
    return Sweep(results, None)
