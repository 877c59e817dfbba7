"""Perplexity of a text under sliding windows, for anything that scores token ids."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from modelmill.core.errors import UsageError

ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ScoreWindow:
    """ids[begin:end] are read; the last ``scored`` of them count."""

    begin: int
    end: int
    scored: int


class WindowScorer(Protocol):
    """Natural-log probabilities of each window's tokens given those before them in the window."""

    def score(self, windows: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """For each window of T ids, T - 1 values: those of ids[1:]."""


@dataclass(frozen=True)
class Perplexity:
    """perplexity = exp(nll); nll: mean negative log likelihood over the scored tokens, in nats."""

    perplexity: float
    nll: float
    tokens: int
    windows: int
    seconds: float


def sliding_windows(count: int, max_length: int, stride: int) -> list[ScoreWindow]:
    """Cut ``count`` tokens into windows of at most ``max_length`` that begin every ``stride``
    tokens.

    A token is scored once, in the first window that holds it, with all of that window before it; a
    window's own
    first token has nothing before it and is not scored. With stride = max_length the windows do not
    overlap.
    Raises UsageError for sizes that leave nothing to score.
    """
    if max_length < 2:
        raise UsageError(f"--max-length must be at least 2, not {max_length}")
    if not 1 <= stride <= max_length:
        raise UsageError(f"--stride must be between 1 and --max-length {max_length}, not {stride}")
    found = []
    done = 0
    for begin in range(0, count, stride):
        end = min(begin + max_length, count)
        scored = min(end - done, end - begin - 1)
        if scored > 0:
            found.append(ScoreWindow(begin, end, scored))
        done = end
        if end == count:
            break
    if not found:
        raise UsageError(f"{count} tokens are too few for a perplexity; give a longer text")
    return found


def measure_perplexity(
    ids: Sequence[int],
    scorer: WindowScorer,
    *,
    max_length: int,
    stride: int,
    on_progress: ProgressCallback | None = None,
) -> Perplexity:
    """The perplexity of ``ids``; progress is called with ("perplexity", windows done, windows in
    all).
    """
    windows = sliding_windows(len(ids), max_length, stride)
    began = time.perf_counter()
    total, tokens = 0.0, 0
    scores = scorer.score([ids[window.begin : window.end] for window in windows])
    for done, (window, values) in enumerate(zip(windows, scores, strict=True), 1):
        if len(values) != window.end - window.begin - 1:
            raise AssertionError(
                f"{len(values)} scores for a window of {window.end - window.begin} tokens"
            )
        total += math.fsum(values[len(values) - window.scored :])
        tokens += window.scored
        if on_progress is not None:
            on_progress("perplexity", done, len(windows))
    nll = -total / tokens
    value = math.exp(nll) if nll < 700.0 else math.inf
    return Perplexity(value, nll, tokens, len(windows), time.perf_counter() - began)
