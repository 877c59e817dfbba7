"""CUDA graphs of the prefill of one short prompt, whose 300 kernel launches take longer than it.

They serve steps of a single sequence with up to 1,024 prompt tokens left. Such a step is padded to
one of twelve sizes whether it is captured yet or not, so that the same prompt always gives the same
results. Steps of several sequences have too many different sizes. From some hundred tokens on, the
GPU computes for longer than the host launches and padding costs time: such a step is padded only if
it nearly has one of the sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from modelmill.core import log
from modelmill.core.config import RunConfig
from modelmill.core.quoting import one_line
from modelmill.ops.cuda_graph import (
    CapturedGraph,
    GraphCapturer,
    NotCapturable,
    dry_run,
    on_side_stream,
)
from modelmill.parallel.tp_group import TPGroup
from modelmill.runtime.batch import PackedBatch
from modelmill.runtime.decode_graphs import context_bucket

_log = log.get_logger(__name__)
PREFILL_GRAPH_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024)
FREE_PAD_TOKENS = 512  # up to this size padding costs less than launching
MAX_PAD_FRACTION = 1 / 64  # share of padding allowed in a larger size
# uses of a size until it is captured: a capture takes as long as ten steps
CAPTURE_AFTER_USES = 2
MAX_GRAPHS = 16  # steps of further sizes are launched kernel by kernel
# device memory of all graphs: mostly a cuBLAS workspace in each
MAX_GRAPH_BYTES = MAX_GRAPHS * 40 << 20
OOM_RETRY_USES = 100  # uses of a size between an out-of-memory error and the next capture


# (tokens, bound on the context): they determine a step's layout and launches
PrefillSize = tuple[int, int]


def prefill_graphs_enabled(config: RunConfig, tp_group: TPGroup) -> bool:
    """Whether prefill graphs are used: only without tensor parallelism."""
    return config.cuda_graphs and tp_group.size == 1


class PrefillGraphs:
    """Logits [1, V] of padded steps, by graph from the second use of a size on."""

    def __init__(
        self,
        forward: Callable[[PackedBatch], torch.Tensor],
        capture: Callable[[Callable[[], torch.Tensor]], CapturedGraph[torch.Tensor]],
        max_tokens: int,
        max_len: int,
    ) -> None:
        """Start without graphs.

        Args:
            forward: Logits of a batch.
            capture: Captures a call. If it raises NotCapturable, graphs are switched off; after an
                out-of-memory error it is tried again later.
            max_tokens: Most tokens of a step.
            max_len: Most tokens of a sequence.
        """
        self._forward, self._capture = forward, capture
        self._max_len = max_len
        self.sizes = tuple(
            size
            for i, size in enumerate(PREFILL_GRAPH_SIZES)
            if size <= max_tokens and (i == 0 or PREFILL_GRAPH_SIZES[i - 1] < max_len)
        )
        self._captured: dict[PrefillSize, CapturedGraph[torch.Tensor]] = {}
        self._num_uses: dict[PrefillSize, int] = {}
        self._enabled = True

    def __len__(self) -> int:
        """Number of captured graphs."""
        return len(self._captured)

    def all_sizes(self) -> list[PrefillSize]:
        """Every size with the context bound of a first chunk, largest first.

        The smaller graphs reuse the memory pool of the largest.
        """
        return [
            (size, self._context_bound(min(size, self._max_len))) for size in reversed(self.sizes)
        ]

    def padded_size(self, tokens: int, context: int) -> PrefillSize | None:
        """(tokens, context) that a step is padded to; None: it is not padded."""
        size = next((size for size in self.sizes if size >= tokens), None)
        if (
            tokens < 2
            or size is None
            or (size > FREE_PAD_TOKENS and size - tokens > MAX_PAD_FRACTION * size)
        ):
            return None
        padded = (size, self._context_bound(context))
        # without a graph padding only costs time
        return (
            padded
            if padded in self._captured or (self._enabled and len(self._captured) < MAX_GRAPHS)
            else None
        )

    def _context_bound(self, context: int) -> int:
        return min(context_bucket(context), max(self._max_len, context))

    def run(self, batch: PackedBatch) -> torch.Tensor:
        """The logits of a padded batch; a later call may overwrite them."""
        size = (batch.max_query, batch.max_context)
        captured = self._captured.get(size)
        if captured is None:
            captured = self._capture_if_reused(size, batch)
        if captured is None:
            return self._forward(batch)
        return captured.replay()

    def _capture_if_reused(
        self, size: PrefillSize, batch: PackedBatch
    ) -> CapturedGraph[torch.Tensor] | None:
        self._num_uses[size] = self._num_uses.get(size, 0) + 1
        if (
            not self._enabled
            or self._num_uses[size] < CAPTURE_AFTER_USES
            or len(self._captured) >= MAX_GRAPHS
        ):
            return None
        try:
            captured = self._captured[size] = self._capture(lambda: self._forward(batch))
        except NotCapturable as error:
            _log.warning("prefill without CUDA graphs: %s", one_line(str(error), 300))
            self._enabled = False
            return None
        except torch.OutOfMemoryError:
            self._num_uses[size] = -OOM_RETRY_USES
            return None
        return captured


class PrefillGraphCapturer:
    """Captures calls on a separate stream, within a request."""

    def __init__(self) -> None:
        self._capturer = GraphCapturer()
        self._stream = torch.cuda.Stream()
        self._dry_run_done = False

    def __call__(self, call: Callable[[], torch.Tensor]) -> CapturedGraph[torch.Tensor]:
        """Capture a call; see ``capture`` of ``PrefillGraphs``."""
        with on_side_stream(self._stream):
            call()
            if not self._dry_run_done:
                dry_run(call)
                self._dry_run_done = True
            return self._capturer.capture_on_current_stream(call)
