"""CUDA graphs of a short prompt's step: while its 300 kernels are launched one by one, a GPU waits.

One sequence alone whose prompt, or what is left of it, has up to 1,024 tokens. Its step is filled
up to one of few sizes, recorded or not, so that the same prompt gives the same numbers each time.
Steps of several sequences are too many different ones. From some hundred tokens on a GPU computes
for longer than a host launches, and filling costs time: there a step is recorded only where it
nearly has such a size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from modelmill.core import log
from modelmill.core.config import RunConfig
from modelmill.core.quoting import one_line
from modelmill.parallel.tp_group import TPGroup
from modelmill.runtime.batch import PackedBatch
from modelmill.runtime.decode_graphs import NotCapturable, context_bucket, dry_run, on_side_stream

_log = log.get_logger(__name__)
PREFILL_GRAPH_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024)
FREE_PAD_TOKENS = 512  # tokens up to which filling costs less than launching
MAX_PAD_FRACTION = 1 / 64  # of a larger size that may be filling
# of a kind of step, at the second of which it is recorded: that takes as long as ten steps
CAPTURE_AFTER_USES = 2
MAX_GRAPHS = 16  # graphs; steps of further kinds are launched kernel by kernel
# that they hold: mostly what cuBLAS asks for in each of them
MAX_GRAPH_BYTES = MAX_GRAPHS * 40 << 20
OOM_RETRY_USES = 100  # meetings after one that found no memory


# tokens, bound on the context: a step's layout and launches follow from them
PrefillSize = tuple[int, int]
CapturedPrefill = tuple[Callable[[], None], torch.Tensor]


def prefill_graphs_enabled(config: RunConfig, tp_group: TPGroup) -> bool:
    """Whether there are such graphs: one rank alone has them."""
    return config.cuda_graphs and tp_group.size == 1


class PrefillGraphs:
    """Logits [1, V] of filled steps, by graph from the second meeting on.

    forward: a batch's logits. capture: a call → (what replays it, the tensor where its result is
    then). Where it raises NotCapturable, steps go on without graphs; where there is no memory, it
    is tried again later. max_tokens: of a
    step. max_len: of a sequence.
    """

    def __init__(
        self,
        forward: Callable[[PackedBatch], torch.Tensor],
        capture: Callable[[Callable[[], torch.Tensor]], CapturedPrefill],
        max_tokens: int,
        max_len: int,
    ) -> None:
        self._forward, self._capture = forward, capture
        self._max_len = max_len
        self.sizes = tuple(
            size
            for i, size in enumerate(PREFILL_GRAPH_SIZES)
            if size <= max_tokens and (i == 0 or PREFILL_GRAPH_SIZES[i - 1] < max_len)
        )
        self._captured: dict[PrefillSize, CapturedPrefill] = {}
        self._num_uses: dict[PrefillSize, int] = {}
        self._enabled = True

    def __len__(self) -> int:
        """How many were recorded."""
        return len(self._captured)

    def all_sizes(self) -> list[PrefillSize]:
        """Every size with the bound of sequences that begin with it; the largest first: its memory
        serves the rest.
        """
        return [
            (size, self._context_bound(min(size, self._max_len))) for size in reversed(self.sizes)
        ]

    def padded_size(self, tokens: int, context: int) -> PrefillSize | None:
        """What a step is filled up to; None where it is left as it is."""
        size = next((size for size in self.sizes if size >= tokens), None)
        if (
            tokens < 2
            or size is None
            or (size > FREE_PAD_TOKENS and size - tokens > MAX_PAD_FRACTION * size)
        ):
            return None
        padded = (size, self._context_bound(context))
        # filling alone costs time
        return (
            padded
            if padded in self._captured or (self._enabled and len(self._captured) < MAX_GRAPHS)
            else None
        )

    def _context_bound(self, context: int) -> int:
        return min(context_bucket(context), max(self._max_len, context))

    def run(self, batch: PackedBatch) -> torch.Tensor:
        """The logits, over which a later call may write."""
        size = (batch.max_query, batch.max_context)
        captured = self._captured.get(size)
        if captured is None:
            captured = self._capture_if_reused(size, batch)
        if captured is None:
            return self._forward(batch)
        replay, logits = captured
        replay()
        return logits

    def _capture_if_reused(self, size: PrefillSize, batch: PackedBatch) -> CapturedPrefill | None:
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
            _log.warning("prompts without CUDA graphs: %s", one_line(str(error), 300))
            self._enabled = False
            return None
        except torch.OutOfMemoryError:
            self._num_uses[size] = -OOM_RETRY_USES
            return None
        return captured


class PrefillGraphCapturer:
    """Records calls on a stream of its own.

    All graphs share their memory, since they follow one another.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._dry_run_done = False

    def __call__(self, call: Callable[[], torch.Tensor]) -> CapturedPrefill:
        """As ``PrefillGraphs`` wants it."""
        with on_side_stream(self._stream):
            call()
            if not self._dry_run_done:
                dry_run(call)
                self._dry_run_done = True
            return self._capture_graph(call)

    def _capture_graph(self, call: Callable[[], torch.Tensor]) -> CapturedPrefill:
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would collect garbage and empty the cache first, and somebody waits for
        # this step
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = call()
            graph.capture_end()
        except RuntimeError as error:
            # what failed may have left the stream recording, or the recording void
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotCapturable(str(error)) from None
        return graph.replay, out
