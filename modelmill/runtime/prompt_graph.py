"""CUDA graphs of a short prompt's step: while its 300 kernels are launched one by one, a GPU waits.

One sequence alone whose prompt, or what is left of it, has up to 1,024 tokens. Its step is filled up to one of few
sizes, recorded or not, so that the same prompt gives the same numbers each time. Steps of several sequences are too
many different ones. From some hundred tokens on a GPU computes for longer than a host launches, and filling costs time:
there a step is recorded only where it nearly has such a size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from modelmill.core import log
from modelmill.core.config import RunConfig
from modelmill.core.quote import one_line
from modelmill.parallel.mesh import Mesh
from modelmill.runtime.batch import Batch
from modelmill.runtime.graph import NotRecordable, aside, bucket, rehearsed

_log = log.get(__name__)
SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024)
FREE = 512  # tokens up to which filling costs less than launching
LITTLE = 1 / 64  # of a larger size that may be filling
MEETINGS = 2  # of a kind of step, at the second of which it is recorded: that takes as long as ten steps
MOST = 16  # graphs; steps of further kinds are launched kernel by kernel
MOST_BYTES = MOST * 40 << 20  # that they hold: mostly what cuBLAS asks for in each of them
LATER = 100  # meetings after one that found no memory


Kind = tuple[int, int]  # tokens, bound on the context: a step's layout and launches follow from them
Recorded = tuple[Callable[[], None], torch.Tensor]


def wanted(config: RunConfig, mesh: Mesh) -> bool:
    """Whether there are such graphs: one rank alone has them."""
    return config.cuda_graphs and mesh.size == 1


class PromptGraphs:
    """Logits [1, V] of filled steps, by graph from the second meeting on.

    forward: a batch's logits. record: a call → (what replays it, the tensor where its result is then). Where it raises
    NotRecordable, steps go on without graphs; where there is no memory, it is tried again later. most: tokens of a
    step. longest: tokens of a sequence.
    """

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        record: Callable[[Callable[[], torch.Tensor]], Recorded],
        most: int,
        longest: int,
    ) -> None:
        self._forward, self._record = forward, record
        self._longest = longest
        self.sizes = tuple(size for i, size in enumerate(SIZES) if size <= most and (i == 0 or SIZES[i - 1] < longest))
        self._kept: dict[Kind, Recorded] = {}
        self._met: dict[Kind, int] = {}
        self._works = True

    def __len__(self) -> int:
        """How many were recorded."""
        return len(self._kept)

    def kinds(self) -> list[Kind]:
        """Every size with the bound of sequences that begin with it; the largest first: its memory serves the rest."""
        return [(size, self._bound(min(size, self._longest))) for size in reversed(self.sizes)]

    def filled(self, tokens: int, context: int) -> Kind | None:
        """What a step is filled up to; None where it is left as it is."""
        size = next((size for size in self.sizes if size >= tokens), None)
        if tokens < 2 or size is None or (size > FREE and size - tokens > LITTLE * size):
            return None
        kind = (size, self._bound(context))
        # filling alone costs time
        return kind if kind in self._kept or (self._works and len(self._kept) < MOST) else None

    def _bound(self, context: int) -> int:
        return min(bucket(context), max(self._longest, context))

    def run(self, batch: Batch) -> torch.Tensor:
        """The logits, over which a later call may write."""
        kind = (batch.max_query, batch.max_context)
        kept = self._kept.get(kind)
        if kept is None:
            kept = self._met_again(kind, batch)
        if kept is None:
            return self._forward(batch)
        replay, logits = kept
        replay()
        return logits

    def _met_again(self, kind: Kind, batch: Batch) -> Recorded | None:
        self._met[kind] = self._met.get(kind, 0) + 1
        if not self._works or self._met[kind] < MEETINGS or len(self._kept) >= MOST:
            return None
        try:
            kept = self._kept[kind] = self._record(lambda: self._forward(batch))
        except NotRecordable as error:
            _log.warning("prompts without CUDA graphs: %s", one_line(str(error), 300))
            self._works = False
            return None
        except torch.OutOfMemoryError:
            self._met[kind] = -LATER
            return None
        return kept


class Recorder:
    """Records calls on a stream of its own. All graphs share their memory, since they follow one another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._rehearsed = False

    def __call__(self, call: Callable[[], torch.Tensor]) -> Recorded:
        """As ``PromptGraphs`` wants it."""
        with aside(self._stream):
            call()
            if not self._rehearsed:
                rehearsed(call)
                self._rehearsed = True
            return self._recorded(call)

    def _recorded(self, call: Callable[[], torch.Tensor]) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would collect garbage and empty the cache first, and somebody waits for this step
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
            raise NotRecordable(str(error)) from None
        return graph.replay, out
