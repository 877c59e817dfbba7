"""Adaptive chunked prefill: how many prompt tokens join a decode step, bounded by its latency.

The chunk size is measured, not computed: the cost of a step depends on the model, on the machine
and on other load. It follows a quantile of step times: a mixed step that takes too many times as
long as a decode step makes the chunk smaller, every other mixed step makes it a little larger,
until the share of slow steps equals the ratio of the two rates.

A mixed step costs something before its first prompt token: where no CUDA graph holds its kernels,
the host launches them one by one. If that alone exceeds the limit, smaller chunks make the prompts
slow and no step faster. So the limit is at least a little above the time of mixed steps with few
prompt tokens, which the ends of prompts bring.

A single time may be an outlier: another process took the machine, a kernel was compiled, or the
step was launched ahead and seems to take no time. The baseline is discarded and measured again if
mixed steps are much faster than it, or if it rests on few samples and every mixed step exceeds the
limit.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

MAX_MIXED_TO_DECODE_TIME_RATIO = 2.3
"""Limit of a mixed step's time over a decode step's time.

It keeps the 99th percentile of the inter-token latency below three times the median.
"""
MAX_TIME_RATIO_TO_SMALL_STEP = 1.25
"""Limit of a mixed step's time over the time of one with few prompt tokens, if that is more."""
SMALL_STEP_TOKEN_FRACTION = 1 / 2
"""Share of the chunk up to which a mixed step has few prompt tokens."""
CHUNK_GROWTH, CHUNK_SHRINK = 1.02, 0.75
"""Factors of the chunk after a step within the limit and after a slow one.

The chunk settles where 6 % of the steps are slow.
"""
INITIAL_GROWTH = 1.1
"""Factor within the limit until the first slow step."""
TIMED_DECODE_STEPS_WINDOW = 15
"""Decode steps in the baseline."""
SMALL_STEPS_WINDOW = 9
"""Mixed steps of few prompt tokens whose times are kept, those of other batch sizes excepted."""
RETIME_STEPS, MIN_RETIME_STEPS = 64, 8
"""Mixed steps after which a decode step is timed again; the second if the batch size changed."""
MIN_SAMPLES = 3
"""Samples whose median one outlier cannot change."""
MAX_PREFILL_SECONDS = 1.0
"""Most seconds of a step that prompts may fill: new requests and aborts wait for its end."""
MIN_PREFILL_TOKENS = 128
"""Prompt tokens that such a step may always have; a smaller one is no sample of prefill speed."""
FULL_GEMM_SPEED_TOKENS, FULL_GEMM_SPEED_TOKENS_8BIT = 768, 1024
"""Tokens of a step at which the GEMMs of a 7B model reach full speed: 16-bit and 8-bit inputs."""


class AdaptiveChunkSize:
    """Adapts the chunk size to measured step times."""

    def __init__(
        self,
        min_tokens: int,
        max_tokens: int,
        *,
        initial: int | None = None,
        step_sizes: Sequence[int] = (),
    ) -> None:
        """Start without measurements.

        Args:
            min_tokens: Lower bound of the chunk.
            max_tokens: Upper bound of the chunk.
            initial: The first chunk; None: as many tokens as sequences decode.
            step_sizes: Tokens of a mixed step for which there are CUDA graphs, ascending: the chunk
                is made smaller to fill just one of them.
        """
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.step_sizes = step_sizes
        self._chunk = float(initial) if initial is not None else 0.0
        self._decode_seconds: deque[float] = deque(maxlen=TIMED_DECODE_STEPS_WINDOW)
        self._timed_rows = 0
        self._steps_since_timed = 0
        self._growth = INITIAL_GROWTH
        self._num_late = 0
        self._tokens_per_second: deque[float] = deque(maxlen=MIN_SAMPLES)
        self._small_step_seconds: deque[float] = deque(maxlen=SMALL_STEPS_WINDOW)

    def next_chunk_tokens(self, rows: int) -> int:
        """Prompt tokens that may join the next step, which decodes ``rows`` sequences.

        0 now and then: the step then is a decode step, timed for the baseline.
        """
        if self._chunk == 0.0:
            self._chunk = float(max(self.min_tokens, rows))
        if self._steps_since_timed >= RETIME_STEPS or (
            self._steps_since_timed >= MIN_RETIME_STEPS and self._batch_size_changed(rows)
        ):
            self._steps_since_timed = 0
            return 0
        self._steps_since_timed += 1
        return self._shrink_to_fill_graph_size(rows, self.chunk_tokens)

    def _shrink_to_fill_graph_size(self, rows: int, chunk: int) -> int:
        """The largest chunk up to ``chunk`` that fills a step size; ``chunk`` if none does."""
        if not self.step_sizes or rows + chunk > self.step_sizes[-1]:
            return chunk
        fitting = [s for s in self.step_sizes if rows + self.min_tokens <= s <= rows + chunk]
        return fitting[-1] - rows if fitting else chunk

    @property
    def chunk_tokens(self) -> int:
        """The current chunk in tokens."""
        return max(self.min_tokens, int(self._chunk))

    def max_prefill_tokens(self, budget: int) -> int:
        """Tokens of a step that prompts may fill: at most ``budget``, and MAX_PREFILL_SECONDS."""
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
        """Report the time of a step that prompts could fill."""
        if tokens >= MIN_PREFILL_TOKENS and seconds > 0.0:
            self._tokens_per_second.append(tokens / seconds)

    def observe_decoding_step(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Report the time of a step of ``rows`` decodes and ``prompt_tokens`` prompt tokens."""
        if rows == 0:
            return
        if prompt_tokens == 0:
            if self._batch_size_changed(rows):
                self._decode_seconds.clear()
                self._small_step_seconds.clear()
            self._timed_rows = rows
            self._steps_since_timed = 0
            self._decode_seconds.append(seconds)
            return
        if self._batch_size_changed(rows):
            return
        if prompt_tokens <= self.chunk_tokens * SMALL_STEP_TOKEN_FRACTION:
            self._small_step_seconds.append(seconds)
        if self._decode_seconds and 2 * prompt_tokens >= self.chunk_tokens:
            usual = statistics.median(self._decode_seconds)
            if 2 * seconds < usual:
                # a mixed step cannot be that much faster: the baseline is wrong
                self._decode_seconds.clear()
                self._steps_since_timed = RETIME_STEPS
                return
            late = seconds > self._max_mixed_step_seconds(usual)
            self._num_late = self._num_late + 1 if late else 0
            if self._num_late >= MIN_RETIME_STEPS and len(self._decode_seconds) < MIN_SAMPLES:
                self._num_late, self._steps_since_timed = 0, RETIME_STEPS
            self._growth = CHUNK_GROWTH if late else self._growth
            self._chunk = min(
                max(self._chunk * (CHUNK_SHRINK if late else self._growth), self.min_tokens),
                self.max_tokens,
            )

    def _max_mixed_step_seconds(self, usual: float) -> float:
        """The limit of a mixed step's time, beside decode steps of ``usual`` seconds."""
        limit = MAX_MIXED_TO_DECODE_TIME_RATIO * usual
        if len(self._small_step_seconds) < MIN_SAMPLES:
            return limit
        return max(
            limit, MAX_TIME_RATIO_TO_SMALL_STEP * statistics.median(self._small_step_seconds)
        )

    def _batch_size_changed(self, rows: int) -> bool:
        """Whether the batch size differs too much from that of the baseline."""
        return not (2 * self._timed_rows <= 3 * rows and 2 * rows <= 3 * self._timed_rows)


def default_max_mixed_tokens(weight_bytes: int, *, inputs_8bit: bool = False) -> int:
    """Default of most tokens of a mixed step (decode and prefill) on a GPU.

    As many as compute for 10 ms at 700 TFLOP/s (two operations and two bytes per weight): enough to
    hide the launch of the next step, kernel by kernel where it is no graph, and no more, for the
    latency of the decodes. At least as many as the GEMMs of a 7B model need for full speed.

    Args:
        weight_bytes: Of all weights.
        inputs_8bit: Whether most weights take 8-bit inputs.
    """
    weight_bytes = max(weight_bytes, 1)
    return max(
        FULL_GEMM_SPEED_TOKENS_8BIT if inputs_8bit else FULL_GEMM_SPEED_TOKENS,
        round(0.010 * 700e12 / weight_bytes / 128) * 128,
    )
