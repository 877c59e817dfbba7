"""CUDA graphs of decode steps: the whole step, from the previous step's ids to this step's ids.

A graph is captured at first use for a batch size and a bound on the context. Its inputs, sampling
parameters included, are at fixed addresses (``batch_layout.BatchLayout``), so that one graph serves
every mix of temperature, top-k, top-p and min-p. Smaller batches are padded with sequences of
context 0 and slot −1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from modelmill.ops.cuda_graph import CapturedGraph, GraphCapturer, dry_run, on_side_stream
from modelmill.runtime.batch import PackedBatch, Packer
from modelmill.runtime.batch_layout import BatchLayout

# Output of a graph: ids by argmax, sampled ids, or logits (for penalties, grammars, logprobs).
GREEDY, SAMPLED, LOGITS = "greedy", "sampled", "logits"


class DecodeGraphs:
    """Captured decode steps, by layout, context bound and output."""

    def __init__(
        self,
        forward: Callable[[PackedBatch], torch.Tensor],
        select_ids: Callable[[torch.Tensor, dict[str, torch.Tensor] | None], torch.Tensor],
        last_ids: torch.Tensor,
        packer: Packer,
        max_seqs: int,
        max_len: int,
    ) -> None:
        """Start without graphs.

        Args:
            forward: Logits of a batch.
            select_ids: Ids from logits and sampling inputs (None: argmax).
            last_ids: Sampled ids by page table row, written by the graphs.
            packer: Makes the batches.
            max_seqs: Most sequences of a graph.
            max_len: Most tokens of a sequence.
        """
        self._forward = forward
        self._select_ids = select_ids
        self._last_ids = last_ids
        self._packer = packer
        self.sizes = graph_batch_sizes(max_seqs)
        self.max_seqs = max_seqs
        self._max_len = max_len
        self._graphs: dict[tuple[BatchLayout, int, str], CapturedGraph[torch.Tensor]] = {}
        self._capturer = GraphCapturer()
        self._logits: torch.Tensor | None = None
        self._dry_run_outputs: set[str] = set()

    def padded_size(self, seqs: int, context: int) -> tuple[int, int]:
        """(sequences, context) of the smallest graph that fits."""
        size = next(s for s in self.sizes if s >= seqs)
        return size, min(context_bucket(context), max(self._max_len, context))

    def replay(self, batch: PackedBatch, graph_output: str) -> torch.Tensor:
        """Run a padded batch by graph; captures the graph if there is none yet.

        Returns:
            The ids, which are written to ``last_ids`` too; with ``LOGITS`` the logits. The next
            replay overwrites them.

        Raises:
            NotCapturable: An op synchronizes with the host.
        """
        key = (batch.views.layout, batch.max_context, graph_output)
        entry = self._graphs.get(key)
        if entry is None:
            entry = self._graphs[key] = self._capture(batch, graph_output)
        return entry.replay()

    def _capture(self, batch: PackedBatch, graph_output: str) -> CapturedGraph[torch.Tensor]:
        """Capture a graph after running the batch itself for warm-up.

        Running a step twice is harmless: it writes the same keys and values.
        """
        batch = _with_last_ids(batch)
        with on_side_stream(torch.cuda.Stream()):
            self._run(batch, graph_output)
            if graph_output not in self._dry_run_outputs:
                self._dry_run(batch, graph_output)
        return self._capturer.capture(lambda: self._run_and_keep_ids(batch, graph_output))

    def _run_and_keep_ids(self, batch: PackedBatch, graph_output: str) -> torch.Tensor:
        out = self._run(batch, graph_output)
        if graph_output != LOGITS:
            self._last_ids[batch.views.keep_slots] = out
        return out

    def _run(self, batch: PackedBatch, graph_output: str) -> torch.Tensor:
        logits = self._forward(batch)
        if graph_output == LOGITS:
            return self._logits_buffer(logits)[: batch.tokens].copy_(logits)
        return self._select_ids(
            logits, batch.views.sampling_inputs(len(logits)) if graph_output == SAMPLED else None
        )

    def _dry_run(self, batch: PackedBatch, graph_output: str) -> None:
        """Check once per output that all ops can be captured."""
        dry_run(lambda: self._run(batch, graph_output))
        self._dry_run_outputs.add(graph_output)

    def _logits_buffer(self, logits: torch.Tensor) -> torch.Tensor:
        """The output buffer of all LOGITS graphs."""
        if self._logits is None:
            shape = (self.sizes[-1], logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits


def graph_batch_sizes(max_seqs: int) -> list[int]:
    """Batch sizes of graphs: 1, 2, 4, 8, then by 8 to 64, by 16 to 256, by 32 to ``max_seqs``.

    The last size is the first that is at least ``max_seqs``.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_seqs:
        last = sizes[-1]
        sizes.append(last + (8 if last < 64 else 16 if last < 256 else 32))
    return [s for i, s in enumerate(sizes) if i == 0 or sizes[i - 1] < max_seqs]


def context_bucket(context: int) -> int:
    """A bound on the context: 4,096 times a power of four.

    Few bounds are enough, because kernels split each sequence's actual context.
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
