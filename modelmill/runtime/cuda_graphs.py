"""CUDA graphs of steps: whole decode steps, and steps with up to 1,024 prompt tokens.

A *decode graph* runs the step from the previous step's ids to this step's ids. It is captured at
first use for a batch size and a bound on the context. Its inputs, sampling parameters included, are
at fixed addresses (``batch.BatchBufferLayout``), so that one graph serves every mix of temperature,
top-k, top-p and min-p. Smaller batches are padded with sequences of context 0 and slot −1.

A *prefill graph* runs a step with prompts, of up to 1,024 tokens: its 300 kernel launches take
longer than it computes. The step of a single prompt is padded to one of twelve sizes whether it is
captured yet or not, so that the same prompt always gives the same results. From some hundred tokens
on, the GPU computes for longer than the host launches and padding costs time: such a step is padded
only if it nearly has one of the sizes.

A *mixed graph* is a prefill graph of several sequences: prompts beside sequences that decode. It is
padded to a number of tokens and a number of sequences, and gives logits for one row of each
sequence. The scheduler fills such steps to just one of the sizes while prompts wait
(``graph_sizes.MIXED_GRAPH_TOKEN_COUNTS``). A streaming client waits for each of these steps:
launched kernel by kernel, one takes three to four times as long as a decode step, however few its
tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch

from modelmill.core import log
from modelmill.core.config import RunConfig
from modelmill.core.quoting import truncate_to_one_line
from modelmill.nn.recurrent_state import RecurrentStateCache
from modelmill.ops.cuda_graph import (
    CapturedGraph,
    GraphCapturer,
    NotCapturable,
    run_on_side_stream,
    run_without_host_sync,
)
from modelmill.runtime.batch import BatchPacker, PackedBatch
from modelmill.runtime.batch_buffer_layout import BatchBufferLayout
from modelmill.runtime.graph_sizes import (
    MAX_GRAPH_SEQS,
    MAX_GRAPH_TOKENS_TIMES_RANKS,
    MAX_SINGLE_PROMPT_GRAPHS,
    MIXED_GRAPH_TOKEN_COUNTS,
    PREFILL_GRAPH_BYTES,
    PaddedStepShape,
    PrefillGraphLimits,
    context_bucket,
    graph_batch_sizes,
    max_mixed_graphs,
)

_log = log.get_logger(__name__)
# Output of a graph: ids by argmax, sampled ids, or logits (for penalties, grammars, logprobs).
GREEDY_GRAPH_OUTPUT, SAMPLED_GRAPH_OUTPUT, LOGITS_GRAPH_OUTPUT = "greedy", "sampled", "logits"
# uses of a size until it is captured: a capture takes as long as ten steps
CAPTURE_AFTER_USES = 2
OOM_RETRY_USES = 100  # uses of a size between an out-of-memory error and the next capture


@dataclass(frozen=True)
class GraphLimits:
    """Which CUDA graphs a runner captures.

    Attributes:
        max_seqs: Sequences of the largest decode graph.
        max_context: Most tokens of a sequence.
        prefill: Sizes of the prefill graphs.
    """

    max_seqs: int
    max_context: int
    prefill: PrefillGraphLimits


def graph_limits(
    config: RunConfig, max_pages_per_seq: int, device_bytes: int
) -> GraphLimits | None:
    """Which CUDA graphs are captured; None: none.

    All-reduces in a graph are one exchange over peer memory (``parallel.peer_buffers``), in which
    each rank reads what all others wrote: its time grows with tokens and ranks.

    Args:
        config: The engine's.
        max_pages_per_seq: KV pages of the longest sequence.
        device_bytes: Memory of the GPU; 0: there is none.
    """
    if not config.cuda_graphs or not device_bytes:
        return None
    max_seqs = min(config.max_num_seqs, MAX_GRAPH_SEQS)
    max_context = max_pages_per_seq * config.page_size
    mixed = _max_mixed_graphs(config, device_bytes)
    max_tokens = config.max_num_batched_tokens
    if config.tp > 1:
        max_tokens = min(max_tokens, MAX_GRAPH_TOKENS_TIMES_RANKS // config.tp)
    prefill = PrefillGraphLimits(max_tokens, max_context, max_seqs, mixed)
    return GraphLimits(max_seqs, max_context, prefill)


def max_prefill_graph_bytes(config: RunConfig, device_bytes: int) -> int:
    """Device memory that the prefill graphs may take; arguments as of ``graph_limits``."""
    if not device_bytes or not config.cuda_graphs:
        return 0
    return (
        MAX_SINGLE_PROMPT_GRAPHS + _max_mixed_graphs(config, device_bytes)
    ) * PREFILL_GRAPH_BYTES


def _max_mixed_graphs(config: RunConfig, device_bytes: int) -> int:
    """Most mixed graphs; none where no step can be one."""
    is_mixed = (
        config.max_num_seqs > 1 and config.max_num_batched_tokens >= MIXED_GRAPH_TOKEN_COUNTS[0]
    )
    return max_mixed_graphs(device_bytes) if is_mixed else 0


class DecodeGraphs:
    """Captured decode steps, by layout, context bound and output."""

    def __init__(
        self,
        forward: Callable[[PackedBatch], torch.Tensor],
        select_ids: Callable[[torch.Tensor, dict[str, torch.Tensor] | None], torch.Tensor],
        last_ids: torch.Tensor,
        packer: BatchPacker,
        max_seqs: int,
        max_len: int,
        states: RecurrentStateCache | None = None,
    ) -> None:
        """Start without graphs.

        Args:
            forward: Logits of a batch.
            select_ids: Ids from logits and sampling inputs (None: argmax).
            last_ids: Sampled ids by page table row, written by the graphs.
            packer: Makes the batches.
            max_seqs: Most sequences of a graph.
            max_len: Most tokens of a sequence.
            states: The recurrent states, which a warm-up must not advance.
        """
        self._states = states
        self._forward = forward
        self._select_ids = select_ids
        self._last_ids = last_ids
        self._packer = packer
        self.sizes = graph_batch_sizes(max_seqs)
        self.max_seqs = max_seqs
        self._max_len = max_len
        self._graphs: dict[tuple[BatchBufferLayout, int, str], CapturedGraph[torch.Tensor]] = {}
        self._capturer = GraphCapturer()
        self._logits: torch.Tensor | None = None
        self._capturable_outputs: set[str] = set()

    def padded_shape(self, seqs: int, context: int) -> tuple[int, int]:
        """(sequences, context) of the smallest graph that fits."""
        size = next(s for s in self.sizes if s >= seqs)
        return size, min(context_bucket(context), max(self._max_len, context))

    def replay(self, batch: PackedBatch, graph_output: str) -> torch.Tensor:
        """Run a padded batch by graph; captures the graph if there is none yet.

        Returns:
            The ids, which are written to ``last_ids`` too; with ``LOGITS_GRAPH_OUTPUT`` the logits.
            The next replay overwrites them.

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

        Running a step twice is harmless: it writes the same keys and values. Recurrent states are
        put back.
        """
        batch = _batch_using_last_ids(batch)
        with run_on_side_stream(torch.cuda.Stream()), restore_states_on_exit(self._states, batch):
            self._run(batch, graph_output)
            if graph_output not in self._capturable_outputs:
                self._check_capturable(batch, graph_output)
        return self._capturer.capture(lambda: self._run_and_store_last_ids(batch, graph_output))

    def _run_and_store_last_ids(self, batch: PackedBatch, graph_output: str) -> torch.Tensor:
        out = self._run(batch, graph_output)
        if graph_output != LOGITS_GRAPH_OUTPUT:
            self._last_ids[batch.views.keep_slots] = out
        return out

    def _run(self, batch: PackedBatch, graph_output: str) -> torch.Tensor:
        logits = self._forward(batch)
        if graph_output == LOGITS_GRAPH_OUTPUT:
            return self._logits_buffer(logits)[: batch.tokens].copy_(logits)
        return self._select_ids(
            logits,
            batch.views.sampling_inputs(len(logits))
            if graph_output == SAMPLED_GRAPH_OUTPUT
            else None,
        )

    def _check_capturable(self, batch: PackedBatch, graph_output: str) -> None:
        """Check once per output that all ops can be captured."""
        run_without_host_sync(lambda: self._run(batch, graph_output))
        self._capturable_outputs.add(graph_output)

    def _logits_buffer(self, logits: torch.Tensor) -> torch.Tensor:
        """The output buffer of all LOGITS_GRAPH_OUTPUT graphs."""
        if self._logits is None:
            shape = (self.sizes[-1], logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits


def restore_states_on_exit(
    states: RecurrentStateCache | None, batch: PackedBatch
) -> AbstractContextManager[None]:
    """Within the block, steps of a batch may change the states of its slots."""
    if states is None:
        return nullcontext()
    views = batch.views
    return states.restore_slots_on_exit(torch.cat((views.state_slots, views.snapshot_slots)))


def _batch_using_last_ids(batch: PackedBatch) -> PackedBatch:
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


class PaddedStepAction(Enum):
    """How a padded step runs, as rank 0 decides for all ranks; the value is the command to them."""

    LAUNCH = "launch padded"
    CAPTURE = "capture padded"
    REPLAY = "replay padded"


class PrefillGraphs:
    """Logits of padded steps, by graph from the second use of a size on.

    They are [1, V] of a single sequence, [padded sequences, V] of several. With tensor parallelism
    each rank has its graphs; rank 0 chooses what a step uses (``choose_step_action``), and
    all ranks ``run`` it so: the sums over the ranks are as many on each.
    """

    def __init__(
        self,
        forward: Callable[[PackedBatch], torch.Tensor],
        capture: Callable[[Callable[[], torch.Tensor]], CapturedGraph[torch.Tensor]],
        limits: PrefillGraphLimits,
        states: RecurrentStateCache | None = None,
        *,
        is_parallel: bool = False,
    ) -> None:
        """Start without graphs.

        Args:
            forward: Logits of a batch.
            capture: Captures a call. If it raises NotCapturable, graphs are switched off; after an
                out-of-memory error it is tried again later.
            limits: Which sizes there are.
            states: The recurrent states, which the calls before a capture must not advance.
            is_parallel: Whether there are other ranks. An out-of-memory error is raised then: of
                the calls before a capture, others would run more than this rank.
        """
        self._forward, self._capture = forward, capture
        self.limits, self._states, self._is_parallel = limits, states, is_parallel
        self._captured: dict[PaddedStepShape, CapturedGraph[torch.Tensor]] = {}
        self._num_uses: dict[PaddedStepShape, int] = {}
        self._enabled = True

    def __len__(self) -> int:
        """Number of captured graphs."""
        return len(self._captured)

    def padded_shape(self, tokens: int, seqs: int, context: int) -> PaddedStepShape | None:
        """What a step is padded to; None: it is not padded.

        Args:
            tokens: Of the step.
            seqs: Its sequences.
            context: Most tokens of one, with the new ones.
        """
        padded = self.limits.padded_shape(tokens, seqs, context)
        if padded is None or padded in self._captured or self._can_capture(padded):
            return padded
        # without a graph padding only costs time
        return self._captured_size_above(padded) if padded.is_mixed else None

    def _captured_size_above(self, size: PaddedStepShape) -> PaddedStepShape | None:
        """The captured mixed size with the fewest tokens that holds another one; None: none."""
        holding = [
            each for each in self._captured if each.is_mixed and all(map(operator.ge, each, size))
        ]
        return min(holding, default=None)

    def _can_capture(self, size: PaddedStepShape) -> bool:
        of_its_kind = sum(each.is_mixed == size.is_mixed for each in self._captured)
        return self._enabled and of_its_kind < self.limits.max_graphs(size)

    def choose_step_action(self, size: PaddedStepShape) -> PaddedStepAction:
        """How the next step of this size runs; the use is counted."""
        if size in self._captured:
            return PaddedStepAction.REPLAY
        self._num_uses[size] = self._num_uses.get(size, 0) + 1
        if self._num_uses[size] < CAPTURE_AFTER_USES or not self._can_capture(size):
            return PaddedStepAction.LAUNCH
        return PaddedStepAction.CAPTURE

    def run(self, batch: PackedBatch, size: PaddedStepShape, use: PaddedStepAction) -> torch.Tensor:
        """The logits of a batch that is padded to ``size``; a later call may overwrite them."""
        if use is PaddedStepAction.CAPTURE:
            self._capture_graph(size, batch)
        captured = None if use is PaddedStepAction.LAUNCH else self._captured.get(size)
        return self._forward(batch) if captured is None else captured.replay()

    def _capture_graph(self, size: PaddedStepShape, batch: PackedBatch) -> None:
        try:
            with restore_states_on_exit(self._states, batch):
                self._captured[size] = self._capture(lambda: self._forward(batch))
        except NotCapturable as error:
            _log.warning("prefill without CUDA graphs: %s", truncate_to_one_line(str(error), 300))
            self._enabled = False
        except torch.OutOfMemoryError:
            if self._is_parallel:
                raise
            self._num_uses[size] = -OOM_RETRY_USES


class PrefillGraphCapturer:
    """Captures calls on a separate stream, within a request."""

    def __init__(self) -> None:
        self._capturer = GraphCapturer()
        self._stream = torch.cuda.Stream()
        self._checked_capturable = False

    def __call__(self, call: Callable[[], torch.Tensor]) -> CapturedGraph[torch.Tensor]:
        """Capture a call; see ``capture`` of ``PrefillGraphs``."""
        with run_on_side_stream(self._stream):
            call()
            if not self._checked_capturable:
                run_without_host_sync(call)
                self._checked_capturable = True
            return self._capturer.capture_on_current_stream(call)
