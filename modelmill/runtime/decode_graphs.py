"""CUDA graphs of decode steps: the whole step, from the ids of the last one to the ids of this one.

A graph is recorded for a number of sequences and a bound on their context, when it is first needed.
Its inputs stand at fixed places (``batch_layout.BatchLayout``), how each row is drawn among them,
so that one graph serves every mix of temperature, top-k, top-p and min-p. Smaller batches are
padded with sequences of context 0 whose slots are −1.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from modelmill.runtime.batch import PackedBatch, Packer
from modelmill.runtime.batch_layout import BatchLayout

# What a graph ends with: ids by argmax, ids drawn as the batch says, or logits for what needs
# tables of its own.
GREEDY, SAMPLED, LOGITS = "greedy", "sampled", "logits"


class NotCapturable(RuntimeError):
    """The chosen ops cannot run in a graph."""


@dataclass
class _DecodeGraph:
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor


class DecodeGraphs:
    """Recorded decode steps. forward: a batch's logits. select_ids: ids from logits and how they
    are drawn (None: argmax).

    last_ids: where sampled ids are kept by row. max_seqs: most sequences that a graph serves.
    max_len: most tokens of one.
    """

    def __init__(
        self,
        forward: Callable[[PackedBatch], torch.Tensor],
        select_ids: Callable[[torch.Tensor, dict[str, torch.Tensor] | None], torch.Tensor],
        last_ids: torch.Tensor,
        packer: Packer,
        max_seqs: int,
        max_len: int,
    ) -> None:
        self._forward, self._select_ids, self._last_ids, self._packer = (
            forward,
            select_ids,
            last_ids,
            packer,
        )
        self.sizes = graph_batch_sizes(max_seqs)
        self.max_seqs = max_seqs
        self._max_len = max_len
        self._graphs: dict[tuple[BatchLayout, int, str], _DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._logits: torch.Tensor | None = None
        self._dry_run_outputs: set[str] = set()

    def padded_size(self, seqs: int, context: int) -> tuple[int, int]:
        """(sequences, context) of the smallest graph that serves."""
        size = next(s for s in self.sizes if s >= seqs)
        return size, min(context_bucket(context), max(self._max_len, context))

    def replay(self, batch: PackedBatch, graph_output: str) -> torch.Tensor:
        """Run a padded batch: its ids, which are kept in ``last_ids`` too, or with ``LOGITS`` its
        logits.

        Raises NotCapturable where an op waits for the host.
        """
        key = (batch.views.layout, batch.max_context, graph_output)
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._capture(batch, graph_output)
        found.graph.replay()
        return found.out

    def _capture(self, batch: PackedBatch, graph_output: str) -> _DecodeGraph:
        """The batch's own numbers serve for the dry run: computing a step twice writes the same
        keys and values.
        """
        batch = _with_last_ids(batch)
        with on_side_stream(torch.cuda.Stream()):
            self._run(batch, graph_output)
            if graph_output not in self._dry_run_outputs:
                self._dry_run(batch, graph_output)
        graph = torch.cuda.CUDAGraph()
        # other threads (NCCL's watchdog, a second engine) go on meanwhile: only what this one does
        # is recorded
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self._run(batch, graph_output)
            if graph_output != LOGITS:
                self._last_ids[batch.views.keep_slots] = out
        return _DecodeGraph(graph, out)

    def _run(self, batch: PackedBatch, graph_output: str) -> torch.Tensor:
        logits = self._forward(batch)
        if graph_output == LOGITS:
            return self._logits_buffer(logits)[: batch.tokens].copy_(logits)
        return self._select_ids(
            logits, batch.views.sampling_inputs(len(logits)) if graph_output == SAMPLED else None
        )

    def _dry_run(self, batch: PackedBatch, graph_output: str) -> None:
        """Once."""
        dry_run(lambda: self._run(batch, graph_output))
        self._dry_run_outputs.add(graph_output)

    def _logits_buffer(self, logits: torch.Tensor) -> torch.Tensor:
        """Where every graph leaves its logits."""
        if self._logits is None:
            shape = (self.sizes[-1], logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits


@contextlib.contextmanager
def on_side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on ``stream``, between what the current one has and what it gets: what is written over
    there comes after.
    """
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        here.wait_stream(stream)


def dry_run(call: Callable[[], object]) -> None:
    """Call what will be recorded: an op that waits for the host (a torch reference with ``tolist``)
    cannot be.

    Raises NotCapturable.
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
        raise NotCapturable(str(error)) from None
    finally:
        torch.cuda.set_sync_debug_mode(before)


def graph_batch_sizes(max_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, of 16 to 256 and of 32, up to the first that holds
    ``max_seqs``.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_seqs:
        last = sizes[-1]
        sizes.append(last + (8 if last < 64 else 16 if last < 256 else 32))
    return [s for i, s in enumerate(sizes) if i == 0 or sizes[i - 1] < max_seqs]


def context_bucket(context: int) -> int:
    """A bound for the context: 4,096 times a power of four.

    Few, since kernels divide each sequence's own context.
    """
    bound = 4096
    while bound < context:
        bound *= 4
    return bound


def _with_last_ids(batch: PackedBatch) -> PackedBatch:
    return PackedBatch(
        batch.views,
        batch.tokens,
        batch.all_rows,
        batch.max_query,
        batch.max_context,
        True,
        None,
        None,
    )
