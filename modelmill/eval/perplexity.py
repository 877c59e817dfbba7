"""Perplexity of a text with sliding windows, for any model that scores token ids."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from modelmill.core.errors import UsageError
from modelmill.core.progress_callback import Progress


@dataclass(frozen=True)
class ScoreWindow:
    """A window ids[begin:end] of which the last ``scored`` tokens count."""

    begin: int
    end: int
    scored: int


class WindowScorer(Protocol):
    """Computes natural-log probabilities of each window's tokens, given those before them."""

    def score(self, windows: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """Yield T - 1 values for each window of T ids: those of ids[1:]."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity exp(nll); nll: mean negative log likelihood of the scored tokens, in nats."""

    perplexity: float
    nll: float
    tokens: int
    windows: int
    seconds: float


def sliding_windows(count: int, max_length: int, stride: int) -> list[ScoreWindow]:
    """Cut ``count`` tokens into windows of at most ``max_length``, one every ``stride`` tokens.

    Each token is scored once, in the first window that contains it, with the tokens before it in
    that window as context. The first token of a window has no context and is not scored. With
    stride = max_length the windows do not overlap.

    Raises:
        UsageError: if a size is out of range or no token can be scored.
    """
    if max_length < 2:
        raise UsageError(f"--max-length must be at least 2, not {max_length}")
    if not 1 <= stride <= max_length:
        raise UsageError(f"--stride must be between 1 and --max-length {max_length}, not {stride}")
    windows = []
    done = 0
    for begin in range(0, count, stride):
        end = min(begin + max_length, count)
        scored = min(end - done, end - begin - 1)
        if scored > 0:
            windows.append(ScoreWindow(begin, end, scored))
        done = end
        if end == count:
            break
    if not windows:
        raise UsageError(f"{count} tokens are too few for a perplexity; give a longer text")
    return windows


def measure_perplexity(
    ids: Sequence[int],
    scorer: WindowScorer,
    *,
    max_length: int,
    stride: int,
    on_progress: Progress | None = None,
) -> Perplexity:
    """Measure the perplexity of ``ids``.

    Args:
        ids: token ids of the text.
        scorer: the model.
        max_length: largest window, in tokens.
        stride: distance of the windows, in tokens.
        on_progress: called with ("perplexity", windows done, number of windows).
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
