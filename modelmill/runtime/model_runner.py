"""Runs steps: packs a schedule, replays a CUDA graph or runs the modules, and samples.

On a GPU a step of decodes alone replays a decode graph, and one with up to 1,024 tokens of prompts
and decodes a prefill graph; all others launch kernel by kernel.

``run`` and ``sample`` launch a scheduled step without waiting; its ``PendingStep`` is read later.
Sampled ids also stay on the device (``last_ids``), so that the next step can use them before the
host has read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from modelmill.core import log
from modelmill.core.errors import UsageError
from modelmill.loader.sleepable_memory import SleepableMemory
from modelmill.nn.forward_hooks import PostHook, PreHook, attached_forward_hooks
from modelmill.nn.fusion import fuse_model
from modelmill.nn.kv import KVCache
from modelmill.nn.recurrent_state import RecurrentStateCache
from modelmill.nn.step import Step
from modelmill.ops.cuda_graph import NotCapturable
from modelmill.ops.registry import Ops
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.runtime.batch import BatchPacker, LogitRowSpec, PackedBatch
from modelmill.runtime.cuda_graphs import (
    CAPTURE_AFTER_USES,
    GREEDY_GRAPH_OUTPUT,
    LOGITS_GRAPH_OUTPUT,
    SAMPLED_GRAPH_OUTPUT,
    DecodeGraphs,
    GraphLimits,
    PaddedStepAction,
    PrefillGraphCapturer,
    PrefillGraphs,
)
from modelmill.runtime.graph_sizes import PaddedStepShape
from modelmill.runtime.pending_step import (
    PendingStep,
    StepForwardResult,
    StepLogitRowMap,
    assign_logit_rows,
    sum_pooled_hidden_states,
)
from modelmill.runtime.sampler import Sampler, SamplingBatch
from modelmill.runtime.scheduler import Schedule
from modelmill.runtime.sequence import Sequence
from modelmill.runtime.tp_worker_pool import (
    COPY_PAGES_COMMAND,
    COPY_STATES_COMMAND,
    FORWARD_COMMAND,
    PADDED_COMMANDS,
    TPWorkerPool,
    WorkerCommand,
)

_log = log.get_logger(__name__)


class ModelRunner:
    """Runs the steps of one model on one device.

    ``decode_graphs`` and ``prefill_graphs`` are None on a CPU and if CUDA graphs are switched off.
    With several ranks, rank 0 launches and sends every step through ``tp_workers`` to the other
    ranks, where ``tp_worker_process`` runs it.
    """

    def __init__(
        self,
        model: nn.Module,
        ops: Ops,
        kv: KVCache,
        packer: BatchPacker,
        sampler: Sampler,
        max_seqs: int,
        tp_group: TPGroup = SINGLE_RANK,
        *,
        tp_workers: TPWorkerPool | None = None,
        graph_limits: GraphLimits | None = None,
        keep_last_ids: bool = False,
        states: RecurrentStateCache | None = None,
        memory: SleepableMemory | None = None,
    ) -> None:
        """Make a runner that is ready for steps; graphs are captured at first use.

        Args:
            model: The model, on its device.
            ops: The ops that its modules call.
            kv: Keys and values of all pages.
            packer: Packs the batches.
            sampler: Samples the tokens.
            max_seqs: Most sequences that run.
            tp_group: This rank's group.
            tp_workers: On rank 0: the other ranks.
            graph_limits: None: no CUDA graphs.
            keep_last_ids: Whether a step may use ids that the host has not read yet.
            states: Recurrent states of all slots; None for a model that keeps none.
            memory: Where the engine can give the memory of weights and KV cache back; the weights
                are moved there. None: it cannot sleep.
        """
        self.tp_group = tp_group
        self.tp_workers = tp_workers
        self.model = model
        self.ops = ops
        self.kv, self.states = kv, states
        self.packer, self.sampler = packer, sampler
        self.device = packer.device
        # one more than there are rows: index −1, the last one, takes the ids of padding rows
        self.last_ids = torch.zeros(max_seqs + 1, dtype=torch.int64, device=self.device)
        self.hooked = False
        self.fused_model = fuse_model(model)
        self.memory = memory
        if memory is not None:
            memory.move_tensors_in([model, self.fused_model])
        self.keep_last_ids = keep_last_ids
        self.decode_graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        if graph_limits is not None:
            self._set_up_graphs(graph_limits)

    def _set_up_graphs(self, limits: GraphLimits) -> None:
        self.decode_graphs = DecodeGraphs(
            self.forward,
            self.sampler.select_ids,
            self.last_ids,
            self.packer,
            limits.max_seqs,
            limits.max_context,
            self.states,
        )
        self.prefill_graphs = PrefillGraphs(
            self.forward,
            PrefillGraphCapturer(),
            limits.prefill,
            self.states,
            is_parallel=self.tp_group.size > 1,
        )

    @property
    def mixed_graph_token_counts(self) -> tuple[int, ...]:
        """Tokens of the mixed steps that run by graph, ascending."""
        if self.prefill_graphs is None or not self.prefill_graphs.limits.max_mixed_graphs:
            return ()
        return self.prefill_graphs.limits.mixed_token_counts

    def set_ops(self, ops: Ops) -> None:
        """Use other ops from now on; captured graphs keep theirs."""
        self.ops = ops

    def free_graphs(self) -> None:
        """Free the CUDA graphs: NCCL cannot close while a captured graph uses it."""
        self.decode_graphs = self.prefill_graphs = None

    @property
    def model_to_run(self) -> nn.Module:
        """The fused tree; the plain one while forward hooks are attached."""
        return self.model if self.hooked else self.fused_model

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits of a packed batch; ids that are still pending are read from ``last_ids``."""
        return self.model_to_run(self._make_step(batch))

    @torch.inference_mode()
    def hidden_states(
        self, batch: PackedBatch, num_pooled_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a batch whose last ``num_pooled_rows`` rows return hidden states.

        Returns:
            Logits of the other rows, and hidden states [num_pooled_rows, H].
        """
        step = self._make_step(batch)
        x = self.model_to_run.hidden_states(step)  # type: ignore[operator]
        rest = len(x) - num_pooled_rows
        logits = self.model.head(x[:rest], step) if rest else x[:0]  # type: ignore[operator]
        return logits, x[rest:]

    def _make_step(self, batch: PackedBatch) -> Step:
        if self.memory is not None and self.memory.is_asleep:
            raise UsageError("the engine sleeps; wake it up first")
        views = batch.views
        ids = views.ids
        if batch.uses_last_ids:
            ids = torch.where(views.last_id_rows >= 0, self.last_ids[views.last_id_rows], ids)
        return batch.to_step(self.kv, self.ops, ids, tp_group=self.tp_group, states=self.states)

    def translate_rank_errors(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, an error caused by the end of another rank becomes a RankError."""
        return (
            contextlib.nullcontext()
            if self.tp_workers is None
            else self.tp_workers.translate_errors()
        )

    def forward_all_ranks(self, batch: PackedBatch) -> torch.Tensor:
        """Run a packed batch on all ranks; returns logits. For evaluation and warm-up."""
        self._broadcast_step(batch, FORWARD_COMMAND)
        return self.forward(batch)

    @torch.inference_mode()
    def run_step_command(self, command: WorkerCommand, batch: PackedBatch) -> None:
        """On ranks above 0: run the step that rank 0 runs after it has sent ``command``."""
        if command.embed_width:
            batch = self._broadcast_embeds(batch, command.embed_width)
        if command.command == FORWARD_COMMAND and command.num_pooled_rows:
            self.hidden_states(batch, command.num_pooled_rows)
        elif command.command == FORWARD_COMMAND:
            self.forward(batch)
        elif command.command in PADDED_COMMANDS:
            self._run_padded_batch(batch, command.padded_shape, PaddedStepAction(command.command))
        elif self.decode_graphs is not None:
            try:
                self.decode_graphs.replay(batch, command.command)
            except NotCapturable as error:
                # rank 0 gets the same error and sends the step again, without graphs
                self._disable_decode_graphs(error)
                return
        if command.num_kept_ids:
            # the ids come from rank 0: only that rank samples
            self._store_last_ids(
                batch, torch.empty(command.num_kept_ids, dtype=torch.int64, device=self.device)
            )

    def _broadcast_step(
        self, batch: PackedBatch, command: str, num_kept_ids: int = 0, num_pooled_rows: int = 0
    ) -> None:
        """Send the batch that was packed last to the other ranks, if there are any."""
        if self.tp_workers is None:
            return
        message = WorkerCommand.from_batch(batch, command, num_kept_ids, num_pooled_rows)
        self.tp_workers.broadcast(message, self.packer.packed_host_buffer(batch))
        if message.embed_width:
            self._broadcast_embeds(batch, message.embed_width)

    def _broadcast_embeds(self, batch: PackedBatch, width: int) -> PackedBatch:
        """Send the image embeddings of a batch from rank 0 to all ranks."""
        size = (batch.tokens, width)
        embeds, mask = batch.embeds, batch.embed_mask
        if embeds is None or mask is None:
            embeds = torch.empty(size, dtype=torch.float32, device=self.device)
            mask = torch.empty(size[0], dtype=torch.uint8, device=self.device)
        embeds = self.tp_group.broadcast(embeds.float())
        mask = self.tp_group.broadcast(mask.to(torch.uint8))
        return replace(batch, embeds=embeds, embed_mask=mask.bool())

    def _store_last_ids(self, batch: PackedBatch, ids: torch.Tensor) -> torch.Tensor:
        """Store sampled ids on the device by page table row, on every rank."""
        ids = self.tp_group.broadcast(ids)
        self.last_ids[batch.views.keep_slots[: len(ids)]] = ids
        return ids

    @torch.inference_mode()
    def launch_forward(self, schedule: Schedule) -> StepForwardResult:
        """Launch the forward pass of a scheduled step without waiting for it.

        A plain decode runs by graph, which samples too unless its logits have to be changed.
        """
        self.copy_pages(schedule.page_copies)
        self.copy_states(schedule.state_copies)
        rows = assign_logit_rows(schedule)
        if not schedule.work:
            return StepForwardResult(schedule, rows)
        sampling = self.sampler.prepare_batch(rows.seqs)
        if self._can_replay_decode_graph(schedule, rows):
            replayed = self._replay_decode_graph(schedule, rows, sampling)
            if replayed is not None:
                return replayed
        prefill_pad = self._padded_prefill_size(schedule, rows)
        batch = self.packer.pack(
            schedule.work, rows.logit_rows(schedule, sampling), prefill_pad=prefill_pad
        )
        num_kept_ids = len(rows.seqs) if self.keep_last_ids else 0
        states = None
        if rows.num_pooled_rows:
            self._broadcast_step(batch, FORWARD_COMMAND, num_kept_ids, rows.num_pooled_rows)
            logits, states = self.hidden_states(batch, rows.num_pooled_rows)
        elif prefill_pad is None:
            self._broadcast_step(batch, FORWARD_COMMAND, num_kept_ids)
            logits = self.forward(batch)
        else:
            logits = self._forward_padded(batch, prefill_pad, num_kept_ids)
        return StepForwardResult(schedule, rows, sampling, batch, logits, states=states)

    @torch.inference_mode()
    def launch_sampling(self, forward: StepForwardResult) -> PendingStep:
        """Launch the sampling of a step and the copies of its results to the host."""
        schedule = forward.schedule
        rows = forward.rows
        sampling = forward.sampling
        batch = forward.batch
        if sampling is None or batch is None:
            return PendingStep(schedule)
        ids = forward.ids
        logits = forward.logits
        n = len(rows.seqs)
        pooled = [] if forward.states is None else sum_pooled_hidden_states(rows, forward.states)
        logprob_table = None
        if n and ids is None and logits is not None:
            ids = self.sampler.sample(logits[:n], sampling, batch.views.sampling_inputs(n))
            logprob_table = self.sampler.logprob_table(logits[:n], sampling, ids)
            if self.keep_last_ids:
                self._store_last_ids(batch, ids)
        pending = PendingStep(
            schedule,
            rows.seqs,
            ids,
            sampling,
            logprob_table,
            [] if logits is None else rows.prompt_logprobs(logits),
            [] if logits is None else rows.beam_logits(logits),
            pooled,
            [seq.computed + count for seq, count in schedule.work],
        )
        return pending.with_host_copies() if self.packer.cuda else pending

    @torch.inference_mode()
    def capture_decode_graphs(self, max_seqs: int) -> None:
        """Capture the graphs of every batch size up to ``max_seqs``, for the shortest contexts."""
        if self.decode_graphs is None:
            return
        for size in [s for s in self.decode_graphs.sizes if s <= max_seqs]:
            batch = self.packer.pack(
                [], LogitRowSpec([], []), self.decode_graphs.padded_shape(size, 1)
            )
            try:
                for graph_output in (GREEDY_GRAPH_OUTPUT, SAMPLED_GRAPH_OUTPUT):
                    self._broadcast_step(batch, graph_output)
                    self.decode_graphs.replay(batch, graph_output)
            except NotCapturable as error:
                self._disable_decode_graphs(error)
                return

    @torch.inference_mode()
    def capture_prefill_graphs(self) -> None:
        """Capture the prefill graph of every size."""
        if self.prefill_graphs is None:
            return
        for size in self.prefill_graphs.limits.capture_sizes():
            for _ in range(CAPTURE_AFTER_USES):
                batch = self.packer.pack([], LogitRowSpec([0], [-1]), prefill_pad=size)
                self._forward_padded(batch, size)

    def _disable_decode_graphs(self, error: NotCapturable) -> None:
        _log.warning("decoding without CUDA graphs: %s", error)
        self.decode_graphs = None

    def copy_pages(self, page_pairs: list[tuple[int, int]]) -> None:
        """Copy pages (from, to) in all layers, with their scales, on all ranks."""
        if not page_pairs:
            return
        pairs = self._broadcast_copy_pairs(COPY_PAGES_COMMAND, page_pairs).to(self.device)
        source, target = pairs[:, 0], pairs[:, 1]
        for cache in self.kv.tensors:
            cache[target] = cache[source]

    def copy_states(self, slot_pairs: list[tuple[int, int]]) -> None:
        """Copy slots of recurrent state (from, to), one after another, on all ranks."""
        if slot_pairs and self.states is not None:
            self._broadcast_copy_pairs(COPY_STATES_COMMAND, slot_pairs)
            self.states.copy_slots(slot_pairs)

    def _broadcast_copy_pairs(self, command: str, pairs: list[tuple[int, int]]) -> torch.Tensor:
        """Send pairs to the other ranks, if there are any; returns them, [n, 2] int64."""
        out = torch.tensor(pairs, dtype=torch.int64)
        if self.tp_workers is not None:
            self.tp_workers.broadcast(
                WorkerCommand(command, out.numel()), out.numpy().data.cast("B")
            )
        return out

    @contextlib.contextmanager
    def forward_hooks(
        self, before: PreHook | None = None, after: PostHook | None = None
    ) -> Iterator[None]:
        """Call hooks around every module; CUDA graphs and fused ops are off meanwhile.

        Args:
            before: (name, args) → other arguments, or None to keep them.
            after: (name, args, output).

        Raises:
            UsageError: There are several ranks: each holds only a shard of a module.
        """
        if self.tp_group.size > 1:
            raise UsageError("module hooks need the whole model on one rank; use --tp 1")
        was_hooked, self.hooked = self.hooked, True
        try:
            with attached_forward_hooks(self.model, before, after):
                yield
        finally:
            self.hooked = was_hooked

    def _can_replay_decode_graph(self, schedule: Schedule, rows: StepLogitRowMap) -> bool:
        """Whether the step is a plain decode: one sampled token per sequence and nothing else."""
        work = schedule.work
        if (
            self.decode_graphs is None
            or self.hooked
            or len(rows.seqs) != len(work)
            or schedule.forks
            or rows.prompt_rows
        ):
            return False
        if any(count != 1 for _, count in work) or any(
            _has_uncomputed_image_tokens(s) for s, _ in work
        ):
            return False
        return len(work) <= self.decode_graphs.max_seqs

    def _replay_decode_graph(
        self, schedule: Schedule, rows: StepLogitRowMap, sampling: SamplingBatch
    ) -> StepForwardResult | None:
        """Run a decode step by graph; None, and graphs off, if an op cannot be captured."""
        assert self.decode_graphs is not None
        work = schedule.work
        n = len(work)
        pad = self.decode_graphs.padded_shape(n, max(s.computed for s, _ in work) + 1)
        keep_slots = [s.table_row for s in rows.seqs]
        logit_rows = LogitRowSpec(range(n), keep_slots, sampling.sampling_inputs())
        batch = self.packer.pack(work, logit_rows, pad)
        # penalties, grammars and logprobs need per-request tables, which no graph holds
        samples_in_graph = not sampling.changes and sampling.logprob_rows is None
        graph_output = (
            (GREEDY_GRAPH_OUTPUT if sampling.greedy else SAMPLED_GRAPH_OUTPUT)
            if samples_in_graph
            else LOGITS_GRAPH_OUTPUT
        )
        self._broadcast_step(batch, graph_output, 0 if samples_in_graph else n)
        try:
            output = self.decode_graphs.replay(batch, graph_output)[:n]
        except NotCapturable as error:
            self._disable_decode_graphs(error)
            return None
        if samples_in_graph:
            return StepForwardResult(schedule, rows, sampling, batch, ids=output)
        return StepForwardResult(schedule, rows, sampling, batch, logits=output)

    def _padded_prefill_size(
        self, schedule: Schedule, rows: StepLogitRowMap
    ) -> PaddedStepShape | None:
        """What a step with prompts is padded to, for a prefill graph; None: it is not padded."""
        work = schedule.work
        if (
            self.prefill_graphs is None
            or self.hooked
            or schedule.forks
            or rows.beam_rows
            or rows.prompt_rows
            or rows.pooled_rows
            or any(_has_uncomputed_image_tokens(seq) for seq, _ in work)
        ):
            return None
        context = max(seq.computed + count for seq, count in work)
        if len(work) == 1 and context > len(work[0][0].tokens):
            return None  # its last id is on the device, where only mixed graphs read it
        return self.prefill_graphs.padded_shape(schedule.num_tokens, len(work), context)

    def _forward_padded(
        self, batch: PackedBatch, size: PaddedStepShape, num_kept_ids: int = 0
    ) -> torch.Tensor:
        """Logits of a padded batch, on all ranks by graph or not."""
        assert self.prefill_graphs is not None
        use = self.prefill_graphs.choose_step_action(size)
        self._broadcast_step(batch, use.value, num_kept_ids)
        return self._run_padded_batch(batch, size, use)

    def _run_padded_batch(
        self, batch: PackedBatch, size: PaddedStepShape, use: PaddedStepAction
    ) -> torch.Tensor:
        assert self.prefill_graphs is not None
        return self.prefill_graphs.run(batch, size, use)


def _has_uncomputed_image_tokens(seq: Sequence) -> bool:
    """Whether tokens still to be computed have image embeddings, which a graph cannot take."""
    return any(span.position + span.length > seq.computed for span in seq.request.embedding_spans)
