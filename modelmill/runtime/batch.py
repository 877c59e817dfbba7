"""Packs a schedule: all integers that a forward pass needs, in one buffer.

They are written into one host buffer (pinned for a GPU) and go to the device in one asynchronous
copy. Tensors there are views of the buffer (``runtime.batch_buffer_layout``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from modelmill.core.config import RunConfig
from modelmill.core.types import ImageEmbeddingSpan
from modelmill.nn.kv import KVCache
from modelmill.nn.recurrent_state import RecurrentStateCache, StepRecurrentStates
from modelmill.nn.step import Step
from modelmill.ops.recurrent_metadata import RecurrentStepMetadata, chunk_size_for_page
from modelmill.ops.registry import Ops
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.runtime.batch_buffer_layout import BatchBufferLayout, BatchViews, HostArrays
from modelmill.runtime.graph_sizes import PaddedStepShape
from modelmill.runtime.kv_pages import PageTables
from modelmill.runtime.sequence import Sequence


@dataclass(frozen=True)
class PackedBatch:
    """A step's integers on the device, and what the host knows about them.

    Attributes:
        views: The integers on the device.
        tokens: T, padding included.
        all_rows: Whether logits are computed for all tokens, in their order.
        max_query: Bound on the tokens of a sequence in this step.
        max_context: Bound on the context of a sequence.
        uses_last_ids: Whether some ids are read from ``ModelRunner.last_ids``.
        embeds: Image embeddings [T, H].
        embed_mask: [T] bool: the tokens that have one.
        num_decodes, num_prompt_keys, is_padded: As in the ``Step``.
    """

    views: BatchViews
    tokens: int
    all_rows: bool
    max_query: int
    max_context: int
    uses_last_ids: bool
    embeds: torch.Tensor | None = None
    embed_mask: torch.Tensor | None = None
    num_decodes: int | None = None
    num_prompt_keys: int = 0
    is_padded: bool = False

    def to_step(
        self,
        kv: KVCache,
        ops: Ops,
        ids: torch.Tensor,
        tp_group: TPGroup = SINGLE_RANK,
        states: RecurrentStateCache | None = None,
    ) -> Step:
        """Make the Step of this batch; ``states``: the recurrent states, if the model keeps any."""
        v = self.views
        step = Step(
            ids=ids,
            positions=v.positions,
            slots=v.slots,
            rope_frequency_ids=v.rope_frequency_ids,
            block_tables=v.block_tables,
            query_start=v.query_start,
            context_lens=v.context_lens,
            logit_rows=None if self.all_rows else v.logit_rows,
            max_query=self.max_query,
            max_context=self.max_context,
            kv=kv,
            ops=ops,
            tp_group=tp_group,
            embeds=self.embeds,
            embed_mask=self.embed_mask,
            state=None if states is None else self._make_step_states(states, kv.page_size),
            num_decodes=self.num_decodes,
            num_prompt_keys=self.num_prompt_keys,
            is_padded=self.is_padded,
        )
        return self._with_layer_steps(step) if kv.layer_groups else step

    def _with_layer_steps(self, step: Step) -> Step:
        """The step with that of each layer, which has the page table of the layer's group."""
        tables = zip(self.views.more_slots, self.views.more_block_tables, strict=True)
        steps = [
            step,
            *(replace(step, slots=slots, block_tables=table) for slots, table in tables),
        ]
        return replace(step, layer_steps=tuple(steps[group] for group in step.kv.layer_groups))

    def _make_step_states(self, states: RecurrentStateCache, page_size: int) -> StepRecurrentStates:
        v = self.views
        rows = RecurrentStepMetadata(
            v.query_start,
            v.positions,
            v.state_slots,
            v.snapshot_slots,
            v.snapshot_ends,
            self.max_query,
            chunk_size_for_page(page_size),
        )
        return StepRecurrentStates(states, rows)


@dataclass(frozen=True)
class LogitRowSpec:
    """Logit rows of a step.

    Attributes:
        rows: Indices into the tokens of the step.
        keep_slots: Index in ``last_ids`` where each sampled id is stored (−1: not needed).
        sampling_inputs: For each of ``batch_buffer_layout.SAMPLING_FIELDS`` one value per
            sample; None: all greedy.
    """

    rows: Seq[int]
    keep_slots: Seq[int]
    sampling_inputs: Mapping[str, np.ndarray] | None = None


class BatchPacker:
    """Builds packed batches.

    Two host buffers alternate, so that one can be filled while the other is being copied.
    """

    def __init__(
        self,
        tables: PageTables,
        page_size: int,
        device: str,
        state_padding: int | None = None,
        expands_history: Callable[[Seq[tuple[int, int]]], bool] | None = None,
    ) -> None:
        """Make a packer without buffers.

        Args:
            tables: The page tables.
            page_size: Tokens of a page.
            device: Where batches are copied to.
            state_padding: The padding slot of the recurrent states; None: there are none.
            expands_history: Whether latent attention expands prompts of (new tokens, keys); None:
                it expands those that begin in a step.
        """
        self.expands_history = expands_history
        self.tables, self.page_size = tables, page_size
        self.state_padding = state_padding
        self.page_groups = len(tables.tables)
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self._buffer_index = 0
        self._host_buffers: list[torch.Tensor] = []
        self._copy_events: list[torch.cuda.Event] = []
        self._device_buffer: torch.Tensor | None = None
        self._arrays: dict[tuple[int, BatchBufferLayout], HostArrays] = {}
        self._views: dict[BatchBufferLayout, BatchViews] = {}

    def reserve(self, layout: BatchBufferLayout) -> None:
        """Make the buffers large enough; earlier views become invalid if they grow."""
        words = layout.num_words()
        if self._host_buffers and self._host_buffers[0].numel() >= words:
            return
        words = max(words, 1 << 14)
        count = 2 if self.cuda else 1
        self._host_buffers = [
            torch.zeros(words, dtype=torch.int64, pin_memory=self.cuda) for _ in range(count)
        ]
        self._copy_events = [torch.cuda.Event() for _ in range(count)] if self.cuda else []
        self._device_buffer = (
            torch.zeros(words, dtype=torch.int64, device=self.device)
            if self.cuda
            else self._host_buffers[0]
        )
        self._arrays.clear()
        self._views.clear()

    def device_views(self, layout: BatchBufferLayout) -> BatchViews:
        """The sections of a layout on the device."""
        self.reserve(layout)
        views = self._views.get(layout)
        if views is None:
            if len(self._views) > 512:
                self._views.clear()
            assert self._device_buffer is not None
            views = self._views[layout] = BatchViews(self._device_buffer, layout)
        return views

    def pack(
        self,
        work: Seq[tuple[Sequence, int]],
        logit_rows: LogitRowSpec,
        decode_pad: tuple[int, int] | None = None,
        prefill_pad: PaddedStepShape | None = None,
    ) -> PackedBatch:
        """Pack a step and start its copy to the device.

        Args:
            work: (sequence, number of tokens).
            logit_rows: Rows whose logits are computed.
            decode_pad: (sequences, context) to pad a decode step to, for a graph.
            prefill_pad: What to pad a step with prompts to, for a graph.
        """
        count = sum(count for _, count in work)
        bounds = prefill_pad
        if decode_pad is not None:
            bounds = PaddedStepShape(decode_pad[0], *decode_pad)
        if bounds is None:
            tokens, seqs, samples = count, len(work), len(logit_rows.rows)
            max_context = max(s.computed + c for s, c in work)
        else:
            tokens, seqs, max_context = bounds
            samples = seqs
        layout = self._buffer_layout(tokens, seqs, samples, max_context)
        views = self.device_views(layout)
        out = self._next_host_arrays(layout)
        if self.state_padding is not None:
            self._pack_state_slots(out, work, self.state_padding)
        decode = prefill_pad is None and (tokens == len(work) or decode_pad is not None)
        if decode:
            uses_last_ids = (
                self._pack_single_decode(out, work[0][0])
                if tokens == len(work) == 1
                else self._pack_decode(out, work, seqs)
            )
        else:
            uses_last_ids = self._pack_mixed(out, work)
            self._pad_tokens(out, count)
        if out.more_slots:
            self._pack_further_page_groups(out, work, count)
        self._write_logit_rows(out, logit_rows, samples)
        self.upload(views)
        embeds, mask = _gather_embeds(work, tokens, self.device)
        all_rows = (
            decode
            and samples == tokens
            and (decode_pad is not None or tokens == 1 or [*logit_rows.rows] == [*range(tokens)])
        )
        max_query = 1 if decode else tokens if bounds is not None else max(c for _, c in work)
        if prefill_pad is not None and prefill_pad.is_mixed:
            uses_last_ids = True  # the graph of all steps of this size
        num_decodes, num_prompt_keys = None, 0
        if not decode and bounds is None:
            num_decodes, num_prompt_keys = self._count_decodes_and_prompt_keys(work)
        return PackedBatch(
            views, tokens, all_rows, max_query, max_context, uses_last_ids, embeds, mask,
            num_decodes, num_prompt_keys, prefill_pad is not None,
        )  # fmt: skip

    def _count_decodes_and_prompt_keys(
        self, work: Seq[tuple[Sequence, int]]
    ) -> tuple[int | None, int]:
        """``num_decodes`` and ``num_prompt_keys`` of the Step."""
        prompts = [(count, seq.computed + count) for seq, count in work if count > 1]
        num_decodes = len(work) - len(prompts)
        if all(count == keys for count, keys in prompts):
            return num_decodes, 0
        if self.expands_history is None or not self.expands_history(prompts):
            return None, 0
        return num_decodes, sum(keys for _, keys in prompts)

    def dummy_batch(self, query: int, seqs: int) -> PackedBatch:
        """A step of empty sequences that reads and stores no keys and values, for warm-up.

        Args:
            query: Tokens of the step; half of the bound on the sequences' context.
            seqs: Number of sequences.
        """
        max_context = 2 * query
        layout = self._buffer_layout(query, seqs, 1, max_context)
        views, out = self.device_views(layout), self._next_host_arrays(layout)
        for section in (
            out.ids,
            out.positions,
            out.rope_frequency_ids,
            out.logit_rows,
            out.query_start,
            out.context_lens,
        ):
            section[:] = 0
        out.last_id_rows[:], out.slots[:], out.keep_slots[:] = -1, -1, -1
        out.block_tables[:] = 0
        if out.more_slots:
            self._pack_further_page_groups(out, [], 0)
        if self.state_padding is not None:
            self._pack_state_slots(out, [], self.state_padding)
        self.upload(views)
        return PackedBatch(views, query, False, query, max_context, False)

    def next_receive_buffer(self, layout: BatchBufferLayout) -> tuple[BatchViews, memoryview]:
        """The buffer for a step that another process packed; fill it, then call ``upload``."""
        views = self.device_views(layout)
        return views, self._buffer_memoryview(self._next_buffer_index(), views)

    def packed_host_buffer(self, batch: PackedBatch) -> memoryview:
        """The host buffer of the batch that was packed last, to be sent to another process."""
        return self._buffer_memoryview(self._buffer_index, batch.views)

    def _buffer_layout(self, tokens: int, seqs: int, rows: int, context: int) -> BatchBufferLayout:
        columns = self._block_table_columns(context)
        has_state, groups = self.state_padding is not None, self.page_groups
        return BatchBufferLayout(tokens, seqs, rows, columns, has_state, groups)

    @staticmethod
    def _pack_state_slots(out: HostArrays, work: Seq[tuple[Sequence, int]], padding: int) -> None:
        """The state slot of each sequence, and where its snapshot is kept."""
        slots, snapshot_slots, snapshot_ends = out.state_fields
        slots[:], snapshot_slots[:], snapshot_ends[:] = padding, padding, -1
        for i, (seq, count) in enumerate(work):
            slots[i] = seq.table_row
            snapshot = seq.planned_state_snapshot(count)
            if snapshot is not None:
                snapshot_slots[i], snapshot_ends[i] = snapshot.slot, snapshot.end

    def _block_table_columns(self, context: int) -> int:
        """Columns of the block tables: a power of two, so that few layouts occur."""
        need = -(-context // self.page_size)
        return min(1 << max(need - 1, 7).bit_length(), max(self.tables.table.shape[1], need))

    def _buffer_memoryview(self, index: int, views: BatchViews) -> memoryview:
        """The part of a host buffer that a step of this layout uses."""
        return self._host_buffers[index][: views.num_words].numpy().data.cast("B")

    def upload(self, views: BatchViews) -> None:
        """Start the copy to the device; on the CPU the buffers are the same."""
        if self.cuda:
            assert self._device_buffer is not None
            words = views.num_words
            self._device_buffer[:words].copy_(
                self._host_buffers[self._buffer_index][:words], non_blocking=True
            )
            self._copy_events[self._buffer_index].record()

    def _next_buffer_index(self) -> int:
        """Index of the next host buffer, once its previous copy is done."""
        self._buffer_index = (self._buffer_index + 1) % len(self._host_buffers)
        if self.cuda:
            self._copy_events[self._buffer_index].synchronize()
        return self._buffer_index

    def _next_host_arrays(self, layout: BatchBufferLayout) -> HostArrays:
        self._next_buffer_index()
        arrays = self._arrays.get((self._buffer_index, layout))
        if arrays is None:
            if len(self._arrays) > 512:
                self._arrays.clear()
            arrays = self._arrays[self._buffer_index, layout] = HostArrays(
                BatchViews(self._host_buffers[self._buffer_index], layout)
            )
        return arrays

    def _pack_single_decode(self, out: HostArrays, seq: Sequence) -> bool:
        """One token of one sequence: ``_pack_decode`` without the cost of temporary arrays."""
        at, size = seq.computed, self.page_size
        uses_last_ids = at >= len(seq.tokens)
        out.ids[0], out.last_id_rows[0] = (
            (0, seq.table_row) if uses_last_ids else (seq.tokens[at], -1)
        )
        out.positions[0] = at
        out.slots[0] = int(self.tables.table[seq.table_row, at // size]) * size + at % size
        keys = seq.rope_frequency_ids(at, at + 1)
        out.rope_frequency_ids[0] = keys if isinstance(keys, int) else keys[0]
        out.context_lens[0] = at + 1
        out.query_start[0], out.query_start[1] = 0, 1
        out.block_tables[0] = self.tables.table[seq.table_row, : out.block_tables.shape[1]]
        return uses_last_ids

    def _pack_decode(self, out: HostArrays, work: Seq[tuple[Sequence, int]], seqs: int) -> bool:
        """One token of each sequence, padded to ``seqs``."""
        n, size = len(work), self.page_size
        rows = [s.table_row for s, _ in work]
        positions = out.positions
        positions[:n] = [s.computed for s, _ in work]
        out.ids[:n] = [s.tokens[s.computed] if s.computed < len(s.tokens) else 0 for s, _ in work]
        last_id_rows = [s.table_row if s.computed >= len(s.tokens) else -1 for s, _ in work]
        out.last_id_rows[:n] = last_id_rows
        at = positions[:n]
        table_rows = np.array(rows, dtype=np.int64)
        pages = self.tables.table[table_rows, at // size].astype(np.int64)
        out.slots[:n] = pages * size + at % size
        rule = work[0][0].rope_length_source.rule if work else "fixed"
        if rule == "fixed":
            out.rope_frequency_ids[:] = 0
        elif rule == "prompt":
            out.rope_frequency_ids[:n] = [s.prompt_key for s, _ in work]
        else:
            for i, (s, _) in enumerate(work):
                out.rope_frequency_ids[i : i + 1] = s.rope_frequency_ids(s.computed, s.computed + 1)
        out.context_lens[:n] = at + 1
        columns = out.block_tables.shape[1]
        out.block_tables[:n] = self.tables.table[table_rows, :columns]
        out.query_start[:] = np.arange(seqs + 1)
        if seqs > n:
            out.ids[n:] = 0
            out.last_id_rows[n:] = -1
            positions[n:] = 0
            out.slots[n:] = -1
            out.rope_frequency_ids[n:] = 0
            out.context_lens[n:] = 0
            out.block_tables[n:] = 0
        return max(last_id_rows, default=-1) >= 0

    def _pack_mixed(self, out: HostArrays, work: Seq[tuple[Sequence, int]]) -> bool:
        """Any number of tokens of each sequence, one sequence after another."""
        size, columns = self.page_size, out.block_tables.shape[1]
        start, uses_last_ids = 0, False
        out.last_id_rows[:] = -1
        for i, (seq, count) in enumerate(work):
            first, stop, end = seq.computed, seq.computed + count, start + count
            known = min(stop, len(seq.tokens))
            seq.write_ids(first, out.ids[start : start + known - first])
            if known < stop:
                out.ids[end - 1], out.last_id_rows[end - 1] = 0, seq.table_row
                uses_last_ids = True
            positions = np.arange(first, stop)
            out.positions[start:end] = positions
            table = self.tables.table[seq.table_row]
            out.slots[start:end] = (
                table[positions // size].astype(np.int64) * size + positions % size
            )
            out.rope_frequency_ids[start:end] = seq.rope_frequency_ids(first, stop)
            out.query_start[i] = start
            out.context_lens[i] = stop
            out.block_tables[i] = table[:columns]
            start = end
        out.query_start[len(work) :] = start
        out.context_lens[len(work) :] = 0
        out.block_tables[len(work) :] = 0
        return uses_last_ids

    def _pack_further_page_groups(
        self, out: HostArrays, work: Seq[tuple[Sequence, int]], count: int
    ) -> None:
        """Slots and block tables of the page groups behind the first, padded.

        Args:
            out: The arrays, with the positions of the tokens.
            work: The sequences and their numbers of tokens.
            count: Tokens of all of them.
        """
        size, n, columns = self.page_size, len(work), out.block_tables.shape[1]
        rows = np.array([seq.table_row for seq, _ in work], dtype=np.int64)
        token_rows = np.repeat(rows, [tokens for _, tokens in work])
        pages, offsets = out.positions[:count] // size, out.positions[:count] % size
        for table, slots, block_tables in zip(
            self.tables.tables[1:], out.more_slots, out.more_block_tables, strict=True
        ):
            slots[:count] = table[token_rows, pages].astype(np.int64) * size + offsets
            slots[count:] = -1
            block_tables[:n] = table[rows, :columns]
            block_tables[n:] = 0

    @staticmethod
    def _pad_tokens(out: HostArrays, num_tokens: int) -> None:
        """Fill the padding tokens after the first ``num_tokens``; slot −1 stores nothing."""
        for section in (out.ids, out.positions, out.rope_frequency_ids):
            section[num_tokens:] = 0
        out.slots[num_tokens:] = -1

    def _write_logit_rows(self, out: HostArrays, logit_rows: LogitRowSpec, samples: int) -> None:
        n = len(logit_rows.rows)
        if n:
            out.logit_rows[:n] = logit_rows.rows
            out.keep_slots[:n] = logit_rows.keep_slots
            if logit_rows.sampling_inputs is not None:
                for name, values in logit_rows.sampling_inputs.items():
                    out.sampling_inputs[name][: len(values)] = values
        if samples > n:
            out.logit_rows[n:] = 0
            out.keep_slots[n:] = -1
            out.sampling_inputs["temperature"][n:] = 0.0


def reserve_step_buffers(packer: BatchPacker, config: RunConfig, max_pages_per_seq: int) -> None:
    """Reserve the buffers of the largest step.

    Graphs contain the buffer's address, so it must never be reallocated.
    """
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    has_state = packer.state_padding is not None
    groups = packer.page_groups
    columns = 2 * max_pages_per_seq
    packer.reserve(BatchBufferLayout(tokens, seqs, tokens + seqs, columns, has_state, groups))


def _gather_embeds(
    work: Seq[tuple[Sequence, int]], tokens: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Image embeddings of the step's tokens [T, H] and their mask; (None, None) without any."""
    if not any(s.request.embedding_spans for s, _ in work):
        return None, None
    parts: list[torch.Tensor] = []
    indices: list[torch.Tensor] = []
    mask = torch.zeros(tokens, dtype=torch.bool)
    start = 0
    for seq, count in work:
        for span in seq.request.embedding_spans:
            low = max(span.position, seq.computed)
            high = min(span.position + span.length, seq.computed + count)
            if low >= high:
                continue
            parts.append(_span_embeds(span)[low - span.position : high - span.position].to(device))
            at = start - seq.computed
            indices.append(torch.arange(at + low, at + high))
            mask[at + low : at + high] = True
        start += count
    if not parts:
        return None, None
    # scattered on the device: only embeddings that are not there yet were copied
    rows = torch.cat(parts)
    embeds = torch.zeros(tokens, rows.shape[1], dtype=rows.dtype, device=device)
    embeds[torch.cat(indices).to(device)] = rows
    return embeds, mask.to(device)


def _span_embeds(span: ImageEmbeddingSpan) -> torch.Tensor:
    """A span's embeddings [length, H]."""
    rows = span.handle
    assert isinstance(rows, torch.Tensor), "the handle of an embedding span must be a tensor here"
    assert rows.ndim == 2, "the embeddings of a span must be [length, H]"
    return rows
