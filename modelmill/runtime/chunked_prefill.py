"""Adaptive chunked prefill: how many prompt tokens join a decode step without hurting inter-token
latency.

The chunk size is measured, not computed: the cost of a step depends on the model, on the machine
and on other load. It follows a quantile of step times: a mixed step that takes too many times as
long as a decode step makes the chunk smaller, every other mixed step makes it a little larger,
until the share of slow steps equals the ratio of the two rates.

A single time may be an outlier: another process took the machine, a kernel was compiled, or the
step was launched ahead and seems to take no time. The baseline is discarded and measured again if
mixed steps are much faster than it, or if it rests on few samples and every mixed step exceeds the
limit.
"""

from __future__ import annotations

import statistics
from collections import deque

MAX_STEP_TIME_RATIO = 2.3
"""A step with a piece, over one without.

The readers' 99th percentile is to stay below three times their median.
"""
GROWTH, SHRINK = 1.02, 0.75
"""The piece after a step within the limit, and after one beyond: it settles where 6 % of the steps
are beyond.
"""
INITIAL_GROWTH = 1.1
"""The same until the first step beyond."""
TIMED_STEPS_WINDOW = 15
RETIME_STEPS, MIN_RETIME_STEPS = 64, 8
"""After so many steps with a piece one goes without, to be timed; sooner where far more or fewer
answers run.
"""
MIN_SAMPLES = 3
"""Times whose median one of them cannot spoil."""
MAX_PREFILL_SECONDS = 1.0
"""Seconds of a step that prompts may fill: whoever asks meanwhile, or leaves, or has just begun,
waits for its end.
"""
MIN_PREFILL_TOKENS = 128
"""Tokens of prompts that may fill a step however long they take; fewer would say little about how
fast many are.
"""
MIN_MIXED_TOKENS, MIN_MIXED_TOKENS_8BIT = 768, 1024
"""Tokens of a step at which the products of a 7B model run at full speed; the same where their
inputs have 8 bits.
"""


class AdaptiveChunk:
    """Owns the chunk size.

    min_tokens, max_tokens: its bounds; alignment: it is a multiple of this.
    """

    def __init__(
        self, min_tokens: int, max_tokens: int, *, initial: int | None = None, alignment: int = 1
    ) -> None:
        """initial: the chunk before anything was measured; None: as many tokens as answers run."""
        self.min_tokens, self.max_tokens, self.alignment = min_tokens, max_tokens, alignment
        self._chunk = float(initial) if initial is not None else 0.0
        self._decode_seconds: deque[float] = deque(maxlen=TIMED_STEPS_WINDOW)
        self._timed_rows = 0
        self._steps_since_timed = 0
        self._growth = INITIAL_GROWTH
        self._num_late = 0
        self._tokens_per_second: deque[float] = deque(maxlen=MIN_SAMPLES)

    def size_for(self, rows: int) -> int:
        """Prompt tokens that may join ``rows`` running answers in the step that is made now; 0: one
        to be timed.
        """
        if self._chunk == 0.0:
            self._chunk = float(max(self.min_tokens, rows))
        if self._steps_since_timed >= RETIME_STEPS or (
            self._steps_since_timed >= MIN_RETIME_STEPS and self._rows_changed(rows)
        ):
            self._steps_since_timed = 0
            return 0
        self._steps_since_timed += 1
        return self.size

    @property
    def size(self) -> int:
        """The piece as it is now, in tokens."""
        return max(self.min_tokens, int(self._chunk) // self.alignment * self.alignment)

    def max_prefill_tokens(self, budget: int) -> int:
        """Tokens, ``budget`` at most, of a step that prompts may fill: as many as take
        MAX_PREFILL_SECONDS, once that is known."""
        if not self._tokens_per_second:
            return budget
        return min(
            budget,
            max(
                MIN_PREFILL_TOKENS,
                round(statistics.median_high(self._tokens_per_second) * MAX_PREFILL_SECONDS),
            ),
        )

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step that prompts could fill took so long."""
        if tokens >= MIN_PREFILL_TOKENS and seconds > 0.0:
            self._tokens_per_second.append(tokens / seconds)

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """A step of ``rows`` answers and ``prompt_tokens`` tokens of prompts took so long."""
        if rows == 0:
            return
        if prompt_tokens == 0:
            if self._rows_changed(rows):
                self._decode_seconds.clear()
            self._timed_rows = rows
            self._steps_since_timed = 0
            self._decode_seconds.append(seconds)
        elif (
            self._decode_seconds and not self._rows_changed(rows) and 2 * prompt_tokens >= self.size
        ):
            usual = statistics.median(self._decode_seconds)
            if 2 * seconds < usual:
                # no step is faster for having a piece
                self._decode_seconds.clear()
                self._steps_since_timed = RETIME_STEPS
                return
            late = seconds > MAX_STEP_TIME_RATIO * usual
            self._num_late = self._num_late + 1 if late else 0
            if self._num_late >= MIN_RETIME_STEPS and len(self._decode_seconds) < MIN_SAMPLES:
                self._num_late, self._steps_since_timed = 0, RETIME_STEPS
            self._growth = GROWTH if late else self._growth
            self._chunk = min(
                max(self._chunk * (SHRINK if late else self._growth), self.min_tokens),
                self.max_tokens,
            )

    def _rows_changed(self, rows: int) -> bool:
        """Whether what was timed says little about so many answers."""
        return not (2 * self._timed_rows <= 3 * rows and 2 * rows <= 3 * self._timed_rows)


def max_mixed_tokens(weight_bytes: int, *, inputs_8bit: bool = False) -> int:
    """Tokens of a step that continues running answers while prompts join, on a GPU.

    As many as compute for 10 ms at 700 TFLOP/s (two operations a weight, two bytes a weight), so
    that launching such
    a step, which is no graph, hides behind the one in front; not more, so that whoever is reading
    waits little; and
    at least as many as let the products of a 7B model run at full speed. inputs_8bit: the inputs of
    most of them.
    """
    each = max(weight_bytes, 1)
    return max(
        MIN_MIXED_TOKENS_8BIT if inputs_8bit else MIN_MIXED_TOKENS,
        round(0.010 * 700e12 / each / 128) * 128,
    )
