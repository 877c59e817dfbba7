"""Runs steps: model, KV pages and ops together, by graph where one serves.

``launch`` starts a scheduled step and returns without waiting; its ``Flight`` is read later. Sampled ids stay on the
device as well (``last``), from where the next step may take them before the host has seen them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from modelmill.core import log
from modelmill.core.errors import UsageError
from modelmill.nn.kv import KVCache
from modelmill.nn.step import Step
from modelmill.ops.shelf import Ops
from modelmill.parallel.mesh import ALONE, Mesh
from modelmill.runtime import logprobs, warm
from modelmill.runtime.batch import Batch, Packer, Wanted
from modelmill.runtime.flight import Flight, Prompted, Rows, pooled_of, rows_of
from modelmill.runtime.graph import DRAWN, GREEDY, LOGITS, Graphs, NotRecordable
from modelmill.runtime.orders import COPY, FORWARD, Order
from modelmill.runtime.prompt_graph import MEETINGS, PromptGraphs
from modelmill.runtime.sampler import Plan, Sampler
from modelmill.runtime.scheduler import Schedule
from modelmill.runtime.sequence import Sequence
from modelmill.runtime.taps import After, Before, watched

_log = log.get(__name__)
# widths of chunks and numbers of sequences between which kernels change their tiles
WARM_QUERIES, WARM_BATCHES = (16, 64, 512), (1, 2, 17)
# and such as prompts beside answers give: kernels may be compiled anew for counts that are no multiple of 16
WARM_ODD = ((37, 9), (137, 9), (501, 17))


class Crew(Protocol):
    """The other ranks, as rank 0 reaches them (``ranks.Crew``)."""

    def tell(self, order: Order, words: memoryview) -> None: ...

    def ping(self) -> None: ...

    def guard(self) -> contextlib.AbstractContextManager[None]: ...


class Runner:
    """What is needed to run a step. ``graphs`` and ``prompts`` are None where there are none (CPU, or switched off; of
    prompts also where there are several ranks).

    Of several ranks, rank 0 launches; through ``crew`` every step reaches the others, where ``follow`` runs it.
    """

    def __init__(
        self,
        model: nn.Module,
        ops: Ops,
        kv: KVCache,
        packer: Packer,
        sampler: Sampler,
        rows: int,
        mesh: Mesh = ALONE,
    ) -> None:
        self.mesh = mesh
        self.crew: Crew | None = None
        self.model, self.ops, self.kv = model, ops, kv
        self.packer, self.sampler = packer, sampler
        self.device = packer.device
        # one place more than rows: where padding writes
        self.last = torch.zeros(rows + 1, dtype=torch.int64, device=self.device)
        self.graphs: Graphs | None = None
        self.prompts: PromptGraphs | None = None
        self.tapped = False
        # whether a step may take ids that the host has not seen
        self.keep = False

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """Logits [R, V] float32 of one step."""
        return self.model(step)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of a packed batch, its ids completed from the device where they are pending."""
        return self.model(self._step(batch))

    @torch.inference_mode()
    def states(self, batch: Batch, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits of the wanted rows but the last ``count``, hidden states [count, H] of those)."""
        step = self._step(batch)
        x = self.model.states(step)  # type: ignore[operator]
        rest = len(x) - count
        logits = self.model.head(x[:rest], step) if rest else x[:0]  # type: ignore[operator]
        return logits, x[rest:]

    def _step(self, batch: Batch) -> Step:
        views = batch.views
        ids = views.ids
        if batch.fed:
            ids = torch.where(views.feed >= 0, self.last[views.feed], ids)
        return batch.step(self.kv, self.ops, ids, whole=not self.tapped, mesh=self.mesh)

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Within it, what goes wrong because another rank has ended is a RankError."""
        return contextlib.nullcontext() if self.crew is None else self.crew.guard()

    def score(self, batch: Batch) -> torch.Tensor:
        """Logits of a packed batch, for measuring."""
        self._order(batch, FORWARD)
        return self.forward(batch)

    @torch.inference_mode()
    def follow(self, order: Order, batch: Batch) -> None:
        """Run what rank 0 runs after it has told ``order``."""
        if order.inserts:
            batch = self._inserts(batch, order.inserts)
        if order.kind == FORWARD and order.states:
            self.states(batch, order.states)
        elif order.kind == FORWARD:
            self.forward(batch)
        elif self.graphs is not None:
            try:
                self.graphs.replay(batch, order.kind)
            except NotRecordable as error:
                # rank 0 meets the same and tells the step again
                self._without_graphs(error)
                return
        if order.keep:
            self._keep(batch, torch.empty(order.keep, dtype=torch.int64, device=self.device))

    def _order(self, batch: Batch, kind: str, keep: int = 0, states: int = 0) -> None:
        """Have the other ranks, where there are any, run this batch, which was packed last."""
        if self.crew is None:
            return
        order = Order.of(batch, kind, keep, states)
        self.crew.tell(order, self.packer.packed(batch))
        if order.inserts:
            self._inserts(batch, order.inserts)

    def _inserts(self, batch: Batch, width: int) -> Batch:
        """Foreign embeddings go from rank 0 to all."""
        size = (batch.tokens, width)
        embeds, mask = batch.embeds, batch.embed_mask
        if embeds is None or mask is None:
            embeds = torch.empty(size, dtype=torch.float32, device=self.device)
            mask = torch.empty(size[0], dtype=torch.uint8, device=self.device)
        embeds = self.mesh.broadcast(embeds.float())
        mask = self.mesh.broadcast(mask.to(torch.uint8))
        return replace(batch, embeds=embeds, embed_mask=mask.bool())

    def _keep(self, batch: Batch, ids: torch.Tensor) -> torch.Tensor:
        """Sampled ids stay on the device, by row, on every rank."""
        ids = self.mesh.broadcast(ids)
        self.last[batch.views.outs[: len(ids)]] = ids
        return ids

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> Flight:
        """Start a scheduled step."""
        flight = Flight(schedule)
        self.copy_pages(schedule.copies)
        if not schedule.work:
            return flight
        work = schedule.work
        flight.reached = [seq.computed + count for seq, count in work]
        found = rows_of(schedule)
        flight.seqs = found.seqs
        plan = flight.plan = self.sampler.plan(found.seqs)
        if not (self._by_graph(schedule, found) and self._replay(flight, plan)):
            rows = [*found.rows]
            rows += [row for members in found.beams.values() for _, row in members]
            rows += [r for _, start, count, _ in found.prompts for r in range(start, start + count)]
            rows += [r for _, start, count in found.pooled for r in range(start, start + count)]
            outs = [s.row for s in found.seqs]
            for leader, siblings in schedule.forks.items():
                at = found.seqs.index(leader)
                # forks get their rows only when they join: their first id is read by the host
                outs[at + 1 : at + 1 + len(siblings)] = [-1] * len(siblings)
            outs += [-1] * (len(rows) - len(outs))
            fill = self._fill(schedule, found)
            batch = self.packer.pack(work, Wanted(rows or [0], outs or [-1], plan.draws()), fill=fill)
            self._finish(flight, found, plan, batch, self.forward if fill is None else self._prompt)
        if self.packer.cuda:
            flight.ids = None if flight.ids is None else flight.ids.to("cpu", non_blocking=True)
            flight.told = None if flight.told is None else flight.told.to("cpu", non_blocking=True)
            for note in flight.pooled:
                note.total = note.total.to("cpu", non_blocking=True)
            flight.event = torch.cuda.Event()
            flight.event.record()
        return flight

    @torch.inference_mode()
    def warm_up(self, largest: int, most: int, *, forms: bool = False) -> None:
        """Record the greedy decode graphs of every size up to ``largest``, for the shortest contexts.

        Before that, steps with prompts of every kind that kernels know apart: some are compiled when first met. forms:
        attention, and products of up to ``most`` tokens, in all of their forms, too, and graphs of short prompts.
        """
        for query in WARM_QUERIES:
            for seqs in WARM_BATCHES:
                self.score(self.packer.blank(query, seqs))
        seen = warm.Seen(self.ops.paged_attention)
        watched, multiplied = warm.watched_products(self.ops)
        usual, self.ops = self.ops, replace(watched, paged_attention=seen)
        for tokens, seqs in WARM_ODD:
            self.score(self.packer.blank(tokens, seqs))
        self.ops = usual
        if forms:
            columns = self.packer.tables.table.shape[1]
            warm.attention(self.ops, seen, largest, columns * self.packer.page_size, columns)
            warm.products(self.ops, multiplied, most)
            self._record_prompts()
        for size in [s for s in self.graphs.sizes if s <= largest] if self.graphs is not None else []:
            assert self.graphs is not None
            batch = self.packer.pack([], Wanted([], []), self.graphs.pad(size, 1))
            try:
                for kind in (GREEDY, DRAWN):
                    self._order(batch, kind)
                    self.graphs.replay(batch, kind)
            except NotRecordable as error:
                self._without_graphs(error)
                return

    def _record_prompts(self) -> None:
        """Graphs of prompts of every size."""
        for size, bound in self.prompts.kinds() if self.prompts is not None else ():
            for _ in range(MEETINGS):
                self._prompt(self.packer.blank(size, 1, bound))

    def _without_graphs(self, error: NotRecordable) -> None:
        _log.warning("decoding without CUDA graphs: %s", error)
        self.graphs = None

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages, all layers, with their scales."""
        if not copies:
            return
        pairs = torch.tensor(copies, dtype=torch.int64)
        if self.crew is not None:
            self.crew.tell(Order(COPY, pairs.numel()), pairs.numpy().data.cast("B"))
        pairs = pairs.to(self.device)
        source, target = pairs[:, 0], pairs[:, 1]
        for cache in self.kv.tensors:
            cache[target] = cache[source]

    @contextlib.contextmanager
    def tap(self, before: Before | None = None, after: After | None = None) -> Iterator[None]:
        """See every module at work, by its name in the model; graphs and fused layers are off meanwhile.

        before: (name, args) → other arguments, or None to keep them. after: (name, args, output). Raises UsageError
        where a module is spread over several ranks, none of which sees the whole of it.
        """
        if self.mesh.size > 1:
            raise UsageError("single modules can be watched on one rank only; use --tp 1")
        was, self.tapped = self.tapped, True
        try:
            with watched(self.model, before, after):
                yield
        finally:
            self.tapped = was

    def _by_graph(self, schedule: Schedule, found: Rows) -> bool:
        work = schedule.work
        if self.graphs is None or self.tapped or len(found.seqs) != len(work) or schedule.forks or found.prompts:
            return False
        if any(count != 1 for _, count in work) or any(_foreign(s) for s, _ in work):
            return False
        return len(work) <= self.graphs.largest

    def _replay(self, flight: Flight, plan: Plan) -> bool:
        """False where graphs turn out not to work with the chosen ops; they are given up then."""
        assert self.graphs is not None
        work = flight.schedule.work
        n = len(work)
        pad = self.graphs.pad(n, max(s.computed for s, _ in work) + 1)
        rows = [s.row for s in flight.seqs]
        batch = self.packer.pack(work, Wanted(range(n), rows, plan.draws()), pad)
        inside = plan.plain and plan.told_rows is None
        kind = (GREEDY if plan.greedy else DRAWN) if inside else LOGITS
        self._order(batch, kind, 0 if inside else n)
        try:
            found = self.graphs.replay(batch, kind)
        except NotRecordable as error:
            self._without_graphs(error)
            return False
        if inside:
            flight.ids = found[:n]
            return True
        flight.ids = self.sampler.sample(found[:n], plan, batch.views.how(n))
        flight.told = self.sampler.told(found[:n], plan, flight.ids)
        self._keep(batch, flight.ids)
        return True

    def _fill(self, schedule: Schedule, found: Rows) -> tuple[int, int] | None:
        """What a step of one prompt alone is filled up to (``prompt_graph``); None for all others."""
        if self.prompts is None or self.tapped or len(schedule.work) != 1 or schedule.forks:
            return None
        seq, count = schedule.work[0]
        reach = seq.computed + count
        if found.beams or found.prompts or found.pooled or seq.request.inserts or reach > len(seq.tokens):
            return None
        return self.prompts.filled(count, reach)

    def _prompt(self, batch: Batch) -> torch.Tensor:
        assert self.prompts is not None
        return self.prompts.run(batch)

    def _finish(
        self, flight: Flight, found: Rows, plan: Plan, batch: Batch, forward: Callable[[Batch], torch.Tensor]
    ) -> None:
        n = len(found.seqs)
        self._order(batch, FORWARD, n if self.keep else 0, found.states)
        if found.states:
            logits, states = self.states(batch, found.states)
            flight.pooled = pooled_of(found, states)
        else:
            logits = forward(batch)
        if n:
            flight.ids = self.sampler.sample(logits[:n], plan, batch.views.how(n))
            flight.told = self.sampler.told(logits[:n], plan, flight.ids)
            if self.keep:
                self._keep(batch, flight.ids)
        start = n
        for members in found.beams.values():
            seqs = [seq for seq, _ in members]
            order = [seqs.index(s) for s in seqs[0].siblings]
            flight.beams.append((seqs[0].beam, logits[start : start + len(seqs)][order]))
            start += len(seqs)
        for seq, _, count, known in found.prompts:
            chosen = torch.tensor(seq.tokens[known + 1 : known + 1 + count], device=logits.device)
            top = min(seq.request.params.prompt_logprobs or 0, logits.shape[1])
            flight.prompted.append(Prompted(seq, logprobs.table(logits[start : start + count], chosen, top)))
            start += count


def _foreign(seq: Sequence) -> bool:
    """Whether the next token brings an embedding of its own, which no graph takes."""
    return any(insert.position + insert.length > seq.computed for insert in seq.request.inserts)
