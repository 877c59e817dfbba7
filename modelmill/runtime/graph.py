"""CUDA graphs of decode steps: the whole step, from the ids of the last one to the ids of this one.

A graph is recorded for a number of sequences and a bound on their context, when it is first needed. Its inputs stand at
fixed places (``batch.Layout``), how each row is drawn among them, so that one graph serves every mix of temperature,
top-k, top-p and min-p. Smaller batches are padded with sequences of context 0 whose slots are −1.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from modelmill.runtime.batch import Batch, Packer
from modelmill.runtime.layout import Layout

# What a graph ends with: ids by argmax, ids drawn as the batch says, or logits for what needs tables of its own.
GREEDY, DRAWN, LOGITS = "greedy", "drawn", "logits"


class NotRecordable(RuntimeError):
    """The chosen ops cannot run in a graph."""


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor


class Graphs:
    """Recorded decode steps. forward: a batch's logits. pick: ids from logits and how they are drawn (None: argmax).

    last: where sampled ids are kept by row. largest: most sequences that a graph serves. longest: most tokens of one.
    """

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        pick: Callable[[torch.Tensor, dict[str, torch.Tensor] | None], torch.Tensor],
        last: torch.Tensor,
        packer: Packer,
        largest: int,
        longest: int,
    ) -> None:
        self._forward, self._pick, self._last, self._packer = forward, pick, last, packer
        self.sizes = sizes_upto(largest)
        self.largest = largest
        self._longest = longest
        self._graphs: dict[tuple[Layout, int, str], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._logits: torch.Tensor | None = None
        self._rehearsed: set[str] = set()

    def pad(self, seqs: int, context: int) -> tuple[int, int]:
        """(sequences, context) of the smallest graph that serves."""
        size = next(s for s in self.sizes if s >= seqs)
        return size, min(bucket(context), max(self._longest, context))

    def replay(self, batch: Batch, kind: str) -> torch.Tensor:
        """Run a padded batch: its ids, which are kept in ``last`` too, or with ``LOGITS`` its logits.

        Raises NotRecordable where an op waits for the host.
        """
        key = (batch.views.layout, batch.max_context, kind)
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._record(batch, kind)
        found.graph.replay()
        return found.out

    def _record(self, batch: Batch, kind: str) -> _Graph:
        """The batch's own numbers serve for the rehearsal: computing a step twice writes the same keys and values."""
        batch = _always_fed(batch)
        with aside(torch.cuda.Stream()):
            self._run(batch, kind)
            if kind not in self._rehearsed:
                self._rehearse(batch, kind)
        graph = torch.cuda.CUDAGraph()
        # other threads (NCCL's watchdog, a second engine) go on meanwhile: only what this one does is recorded
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self._run(batch, kind)
            if kind != LOGITS:
                self._last[batch.views.outs] = out
        return _Graph(graph, out)

    def _run(self, batch: Batch, kind: str) -> torch.Tensor:
        logits = self._forward(batch)
        if kind == LOGITS:
            return self._room(logits)[: batch.tokens].copy_(logits)
        return self._pick(logits, batch.views.how(len(logits)) if kind == DRAWN else None)

    def _rehearse(self, batch: Batch, kind: str) -> None:
        """Once."""
        rehearsed(lambda: self._run(batch, kind))
        self._rehearsed.add(kind)

    def _room(self, logits: torch.Tensor) -> torch.Tensor:
        """Where every graph leaves its logits."""
        if self._logits is None:
            shape = (self.sizes[-1], logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits


@contextlib.contextmanager
def aside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on ``stream``, between what the current one has and what it gets: what is written over there comes after."""
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        here.wait_stream(stream)


def rehearsed(call: Callable[[], object]) -> None:
    """Call what will be recorded: an op that waits for the host (a torch reference with ``tolist``) cannot be.

    Raises NotRecordable.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise NotRecordable(str(error)) from None
    finally:
        torch.cuda.set_sync_debug_mode(before)


def sizes_upto(largest: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, of 16 to 256 and of 32, up to the first that holds ``largest``."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        last = sizes[-1]
        sizes.append(last + (8 if last < 64 else 16 if last < 256 else 32))
    return [s for i, s in enumerate(sizes) if i == 0 or sizes[i - 1] < largest]


def bucket(context: int) -> int:
    """A bound for the context: 4,096 times a power of four. Few, since kernels divide each sequence's own context."""
    bound = 4096
    while bound < context:
        bound *= 4
    return bound


def _always_fed(batch: Batch) -> Batch:
    return Batch(batch.views, batch.tokens, batch.every_row, batch.max_query, batch.max_context, True, None, None)
