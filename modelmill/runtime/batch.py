"""From a schedule to a Step: every integer that a forward pass needs, in one buffer.

The integers are written into one host buffer (pinned for a GPU), go to the device in one asynchronous copy, and are
seen there through views, at places that follow from their ``Layout``.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from modelmill.core.types import Insert
from modelmill.nn.kv import KVCache
from modelmill.nn.step import Step
from modelmill.ops.shelf import Ops
from modelmill.parallel.mesh import ALONE, Mesh
from modelmill.runtime.layout import Arrays, Layout, Views
from modelmill.runtime.pages import PageTables
from modelmill.runtime.sequence import Sequence


@dataclass(frozen=True)
class Batch:
    """A step's integers on the device, and the host's knowledge of them.

    rows: which rows' logits are wanted, in the order of sampling, or None for all. max_query, max_context: bounds.
    fed: whether some ids come from the tokens sampled last.
    """

    views: Views
    tokens: int
    every_row: bool
    max_query: int
    max_context: int
    fed: bool
    embeds: torch.Tensor | None = None
    embed_mask: torch.Tensor | None = None

    def step(self, kv: KVCache, ops: Ops, ids: torch.Tensor, whole: bool = False, mesh: Mesh = ALONE) -> Step:
        """The Step of this batch. whole: nobody watches single modules."""
        v = self.views
        return Step(
            ids=ids,
            positions=v.positions,
            slots=v.slots,
            rope_keys=v.rope_keys,
            block_tables=v.block_tables,
            query_start=v.query_start,
            context_lens=v.context_lens,
            logit_rows=None if self.every_row else v.rows,
            max_query=self.max_query,
            max_context=self.max_context,
            kv=kv,
            ops=ops,
            whole=whole,
            mesh=mesh,
            embeds=self.embeds,
            embed_mask=self.embed_mask,
        )


@dataclass(frozen=True)
class Wanted:
    """Logit rows of a step. rows: index into its tokens. outs: where each sample is kept for the next step (−1: not).

    draws: for each of DRAWN a value per sample; None where none is drawn.
    """

    rows: Seq[int]
    outs: Seq[int]
    draws: Mapping[str, np.ndarray] | None = None


class Packer:
    """Builds batches. Two host buffers take turns, so that one can be filled while the other is being copied."""

    def __init__(self, tables: PageTables, page_size: int, device: str) -> None:
        self.tables, self.page_size = tables, page_size
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self._turn = 0
        self._host: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        self._there: torch.Tensor | None = None
        self._arrays: dict[tuple[int, Layout], Arrays] = {}
        self._views: dict[Layout, Views] = {}

    def reserve(self, layout: Layout) -> None:
        """Make the buffers large enough; views made before become void."""
        words = layout.words()
        if self._host and self._host[0].numel() >= words:
            return
        words = max(words, 1 << 14)
        count = 2 if self.cuda else 1
        self._host = [torch.zeros(words, dtype=torch.int64, pin_memory=self.cuda) for _ in range(count)]
        self._sent = [torch.cuda.Event() for _ in range(count)] if self.cuda else []
        self._there = torch.zeros(words, dtype=torch.int64, device=self.device) if self.cuda else self._host[0]
        self._arrays.clear()
        self._views.clear()

    def views(self, layout: Layout) -> Views:
        """Where the sections of a layout stand on the device."""
        self.reserve(layout)
        views = self._views.get(layout)
        if views is None:
            if len(self._views) > 512:
                self._views.clear()
            assert self._there is not None
            views = self._views[layout] = Views(self._there, layout)
        return views

    def pack(
        self,
        work: Seq[tuple[Sequence, int]],
        want: Wanted,
        pad: tuple[int, int] | None = None,
        fill: tuple[int, int] | None = None,
    ) -> Batch:
        """Write and send a step. pad: (sequences, context) that a decode step is filled up to; fill: (tokens, context)
        that another step is."""
        count = sum(count for _, count in work)
        bounds = fill or pad
        tokens = count if bounds is None else bounds[0]
        seqs = len(work) if pad is None else pad[0]
        samples = len(want.rows) if pad is None else pad[0]
        reach = max(s.computed + c for s, c in work) if bounds is None else bounds[1]
        layout = Layout(tokens, seqs, samples, self._columns(reach))
        views = self.views(layout)
        out = self._write_to(layout)
        decode = fill is None and (tokens == len(work) or pad is not None)
        if decode:
            fed = self._single(out, work[0][0]) if tokens == len(work) == 1 else self._decode(out, work, seqs)
        else:
            fed = self._mixed(out, work)
            self._filled(out, count)
        self._wanted(out, want, samples)
        self.send(views)
        embeds, mask = _inserted(work, tokens, self.device)
        every = decode and samples == tokens and (pad is not None or tokens == 1 or [*want.rows] == [*range(tokens)])
        max_query = 1 if decode else max(c for _, c in work)
        if fill is not None:
            max_query = tokens
        return Batch(views, tokens, every, max_query, reach, fed, embeds, mask)

    def blank(self, query: int, seqs: int, bound: int = 0) -> Batch:
        """A step of ``seqs`` empty sequences, ``query`` tokens wide, that reads and stores nothing: for warming up.

        bound: on their context; twice ``query`` else.
        """
        bound = bound or 2 * query
        layout = Layout(query, seqs, 1, self._columns(bound))
        views, out = self.views(layout), self._write_to(layout)
        for section in (out.ids, out.positions, out.rope_keys, out.rows, out.query_start, out.context_lens):
            section[:] = 0
        out.feed[:], out.slots[:], out.outs[:] = -1, -1, -1
        out.block_tables[:] = 0
        self.send(views)
        return Batch(views, query, False, query, bound, False)

    def take(self, layout: Layout) -> tuple[Views, memoryview]:
        """The place of a step that another process packed: where to put its bytes before ``send``."""
        views = self.views(layout)
        return views, self._bytes(self._next(), views)

    def packed(self, batch: Batch) -> memoryview:
        """The bytes of the batch that was packed last."""
        return self._bytes(self._turn, batch.views)

    def _columns(self, context: int) -> int:
        """Columns of the block tables: a power of two, so that few layouts occur."""
        need = -(-context // self.page_size)
        return min(1 << max(need - 1, 7).bit_length(), max(self.tables.table.shape[1], need))

    def _bytes(self, turn: int, views: Views) -> memoryview:
        return self._host[turn][: views.words].numpy().data.cast("B")

    def send(self, views: Views) -> None:
        """Start copying what was written; on the CPU it is there already."""
        if self.cuda:
            assert self._there is not None
            words = views.words
            self._there[:words].copy_(self._host[self._turn][:words], non_blocking=True)
            self._sent[self._turn].record()

    def _next(self) -> int:
        """The turn of the host buffer that may be written now."""
        self._turn = (self._turn + 1) % len(self._host)
        if self.cuda:
            self._sent[self._turn].synchronize()
        return self._turn

    def _write_to(self, layout: Layout) -> Arrays:
        self._next()
        arrays = self._arrays.get((self._turn, layout))
        if arrays is None:
            if len(self._arrays) > 512:
                self._arrays.clear()
            arrays = self._arrays[self._turn, layout] = Arrays(Views(self._host[self._turn], layout))
        return arrays

    def _single(self, out: Arrays, seq: Sequence) -> bool:
        """One token of one sequence: as ``_decode``, without temporary arrays, whose cost would show on a CPU."""
        at, size = seq.computed, self.page_size
        fed = at >= len(seq.tokens)
        out.ids[0], out.feed[0] = (0, seq.row) if fed else (seq.tokens[at], -1)
        out.positions[0] = at
        out.slots[0] = seq.pages[at // size] * size + at % size
        keys = seq.rope_keys(at, at + 1)
        out.rope_keys[0] = keys if isinstance(keys, int) else keys[0]
        out.context_lens[0] = at + 1
        out.query_start[0], out.query_start[1] = 0, 1
        out.block_tables[0] = self.tables.table[seq.row, : out.block_tables.shape[1]]
        return fed

    def _decode(self, out: Arrays, work: Seq[tuple[Sequence, int]], seqs: int) -> bool:
        """One token of each sequence, padded to ``seqs``."""
        n, size = len(work), self.page_size
        rows = [s.row for s, _ in work]
        positions = out.positions
        positions[:n] = [s.computed for s, _ in work]
        out.ids[:n] = [s.tokens[s.computed] if s.computed < len(s.tokens) else 0 for s, _ in work]
        fed = [s.row if s.computed >= len(s.tokens) else -1 for s, _ in work]
        out.feed[:n] = fed
        at = positions[:n]
        where = np.array(rows, dtype=np.int64)
        out.slots[:n] = self.tables.table[where, at // size].astype(np.int64) * size + at % size
        rule = work[0][0].rope.rule if work else "fixed"
        if rule == "fixed":
            out.rope_keys[:] = 0
        elif rule == "prompt":
            out.rope_keys[:n] = [s.prompt_key for s, _ in work]
        else:
            for i, (s, _) in enumerate(work):
                out.rope_keys[i : i + 1] = s.rope_keys(s.computed, s.computed + 1)
        out.context_lens[:n] = at + 1
        columns = out.block_tables.shape[1]
        out.block_tables[:n] = self.tables.table[where, :columns]
        out.query_start[:] = np.arange(seqs + 1)
        if seqs > n:
            out.ids[n:], out.feed[n:], positions[n:], out.slots[n:], out.rope_keys[n:] = 0, -1, 0, -1, 0
            out.context_lens[n:] = 0
            out.block_tables[n:] = 0
        return max(fed, default=-1) >= 0

    def _mixed(self, out: Arrays, work: Seq[tuple[Sequence, int]]) -> bool:
        """Stretches of any length, one after another."""
        size, columns = self.page_size, out.block_tables.shape[1]
        start, fed = 0, False
        out.feed[:] = -1
        for i, (seq, count) in enumerate(work):
            first, stop, end = seq.computed, seq.computed + count, start + count
            known = min(stop, len(seq.tokens))
            seq.write(first, out.ids[start : start + known - first])
            if known < stop:
                out.ids[end - 1], out.feed[end - 1] = 0, seq.row
                fed = True
            positions = np.arange(first, stop)
            out.positions[start:end] = positions
            table = self.tables.table[seq.row]
            out.slots[start:end] = table[positions // size].astype(np.int64) * size + positions % size
            out.rope_keys[start:end] = seq.rope_keys(first, stop)
            out.query_start[i] = start
            out.context_lens[i] = stop
            out.block_tables[i] = table[:columns]
            start = end
        out.query_start[len(work)] = start
        return fed

    @staticmethod
    def _filled(out: Arrays, count: int) -> None:
        """Tokens of no sequence behind ``count`` that are real: nothing is stored of them."""
        for section in (out.ids, out.positions, out.rope_keys):
            section[count:] = 0
        out.slots[count:] = -1

    def _wanted(self, out: Arrays, want: Wanted, samples: int) -> None:
        n = len(want.rows)
        if n:
            out.rows[:n] = want.rows
            out.outs[:n] = want.outs
            if want.draws is not None:
                for name, values in want.draws.items():
                    out.how[name][: len(values)] = values
        if samples > n:
            out.rows[n:] = 0
            out.outs[n:] = -1
            out.how["temperature"][n:] = 0.0


def _inserted(
    work: Seq[tuple[Sequence, int]], tokens: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Foreign embeddings of the step's tokens, [T, H], and where they stand; (None, None) where there are none."""
    if not any(s.request.inserts for s, _ in work):
        return None, None
    found: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    mask = torch.zeros(tokens, dtype=torch.bool)
    start = 0
    for seq, count in work:
        for insert in seq.request.inserts:
            low = max(insert.position, seq.computed)
            high = min(insert.position + insert.length, seq.computed + count)
            if low >= high:
                continue
            found.append(_rows_of(insert)[low - insert.position : high - insert.position].to(device))
            at = start - seq.computed
            places.append(torch.arange(at + low, at + high))
            mask[at + low : at + high] = True
        start += count
    if not found:
        return None, None
    # what is text needs no way to the device, nor what the eyes have left there
    rows = torch.cat(found)
    embeds = torch.zeros(tokens, rows.shape[1], dtype=rows.dtype, device=device)
    embeds[torch.cat(places).to(device)] = rows
    return embeds, mask.to(device)


def _rows_of(insert: Insert) -> torch.Tensor:
    """An insert's embeddings [length, H]."""
    rows = insert.handle
    assert isinstance(rows, torch.Tensor), "an insert's handle is its embeddings, a tensor"
    assert rows.ndim == 2, "an insert's embeddings are [length, H]"
    return rows
