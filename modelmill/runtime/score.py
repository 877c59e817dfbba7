"""Given tokens through the real pages: the logits that serving would see, for acceptance, perplexity and compare."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from fnmatch import fnmatch
from typing import Any

import torch

from modelmill.core.errors import CapacityError
from modelmill.core.types import Request, SamplingParams
from modelmill.runtime.batch import Wanted
from modelmill.runtime.runner import Runner
from modelmill.runtime.scheduler import Schedule, Scheduler
from modelmill.runtime.sequence import RopeRule, Sequence
from modelmill.runtime.taps import After, Before

# logits [rows, V] are made for so many elements at a time
_LOGITS = 1 << 26
Take = Callable[[int, int, torch.Tensor], None]


class Score:
    """Prefills in chunks of at most ``tokens``, then decodes the given tokens one by one, all in one batch."""

    def __init__(self, runner: Runner, scheduler: Scheduler, rope: RopeRule, tokens: int) -> None:
        self.runner, self.scheduler, self.rope = runner, scheduler, rope
        self.tokens = tokens

    def logits(self, ids: Seq[Seq[int]], decode_from: int | Seq[int] | None = None) -> list[torch.Tensor]:
        """[T, V] float32 on the CPU per list."""
        vocab = self.runner.sampler.vocab
        out = [torch.empty(len(one), vocab) for one in ids]

        def keep(which: int, first: int, logits: torch.Tensor) -> None:
            out[which][first : first + len(logits)] = logits.cpu()

        self.run(ids, decode_from, keep)
        return out

    @torch.inference_mode()
    def run(
        self,
        ids: Seq[Seq[int]],
        decode_from: int | Seq[int] | None = None,
        take: Take | None = None,
        rows: Callable[[int, int], bool] | None = None,
    ) -> None:
        """Run the lists; ``take(which, first, logits)`` receives the logits of consecutive positions on the device.

        decode_from: length of the prompt (one for all or one per list), None: everything is prompt. It decides the
        rope keys too. rows: (which, position) → whether its logits are wanted; default: all that ``take`` wants.
        Raises CapacityError where a list does not fit into the free pages alone.
        """
        starts = [decode_from] * len(ids) if decode_from is None or isinstance(decode_from, int) else list(decode_from)
        todo = list(range(len(ids)))
        while todo:
            seqs, todo = self._fitting(ids, starts, todo)
            try:
                with self.runner.guarded():
                    self._prefill(seqs, take, rows)
                    self._decode(seqs, ids, take, rows)
            finally:
                for seq in seqs:
                    if seq.row >= 0:
                        self.scheduler.remove(seq)

    def trace(
        self,
        ids: Seq[Seq[int]],
        pattern: str = "*",
        decode_from: int | None = None,
        *,
        before: Before | None = None,
        after: After | None = None,
    ) -> dict[str, list[Any]]:
        """Run the lists and keep the outputs of the modules whose names match ``pattern``, as ``Loop.trace``."""
        kept: dict[str, list[Any]] = {}

        def note(name: str, args: tuple[Any, ...], output: Any) -> None:
            if fnmatch(name, pattern):
                kept.setdefault(name, []).append(_copied(output))
            if after is not None:
                after(name, args, output)

        with self.runner.tap(before, note):
            self.run(ids, decode_from)
        return kept

    def _fitting(
        self, ids: Seq[Seq[int]], starts: Seq[int | None], todo: list[int]
    ) -> tuple[list[Sequence], list[int]]:
        """As many sequences as pages and rows last, with all their pages."""
        size, pool, tables = self.scheduler.limits.page_size, self.scheduler.pool, self.scheduler.tables
        seqs: list[Sequence] = []
        for which in todo:
            need = -(-len(ids[which]) // size)
            if need > tables.table.shape[1] or not len(ids[which]):
                raise CapacityError(
                    f"{len(ids[which])} tokens are outside 1…{tables.table.shape[1] * size}, the longest sequence here"
                )
            if need > pool.available or not tables.free:
                break
            start = starts[which]
            prompt = tuple(ids[which] if start is None else ids[which][:start])
            seq = Sequence(Request(id="", prompt=prompt, params=SamplingParams()), which, -1, self.rope, limit=1 << 62)
            for _ in range(need):
                page = pool.take()
                assert page is not None
                seq.pages.append(page)
            seq.row = tables.join(seq.pages)
            self.scheduler.join(seq)
            seqs.append(seq)
        if not seqs:
            raise CapacityError(
                f"{len(ids[todo[0]])} tokens need more KV pages than the {pool.available} that are free"
            )
        return seqs, todo[len(seqs) :]

    def _prefill(self, seqs: list[Sequence], take: Take | None, rows: Callable[[int, int], bool] | None) -> None:
        most = max(_LOGITS // self.runner.sampler.vocab, 1) if take is not None else self.tokens
        while True:
            work: list[tuple[Sequence, int]] = []
            left = min(self.tokens, most)
            for seq in seqs:
                count = min(seq.remaining, left)
                if count:
                    work.append((seq, count))
                    left -= count
            if not work:
                return
            self._step(work, take, rows)

    def _decode(
        self,
        seqs: list[Sequence],
        ids: Seq[Seq[int]],
        take: Take | None,
        rows: Callable[[int, int], bool] | None,
    ) -> None:
        """The rest of each list, one token of each sequence a step."""
        while True:
            work = []
            for seq in seqs:
                if len(seq.tokens) < len(ids[seq.index]):
                    seq.tokens.append(ids[seq.index][len(seq.tokens)])
                    work.append((seq, 1))
            if not work:
                return
            for at in range(0, len(work), self.tokens):
                self._step(work[at : at + self.tokens], take, rows)

    def _step(
        self, work: list[tuple[Sequence, int]], take: Take | None, rows: Callable[[int, int], bool] | None
    ) -> None:
        wanted: list[tuple[int, int, int, int]] = []
        picked: list[int] = []
        start = 0
        for seq, count in work:
            if take is not None:
                for first, n in _runs(seq.index, seq.computed, count, rows):
                    wanted.append((seq.index, first, len(picked), n))
                    at = start + first - seq.computed
                    picked.extend(range(at, at + n))
            start += count
        batch = self.runner.packer.pack(Schedule(work).work, Wanted(picked or [0], [-1] * max(len(picked), 1)))
        logits = self.runner.score(batch)
        for seq, count in work:
            seq.computed += count
        if take is not None:
            for which, first, at, n in wanted:
                take(which, first, logits[at : at + n])


def _runs(which: int, first: int, count: int, rows: Callable[[int, int], bool] | None) -> list[tuple[int, int]]:
    """Stretches (first, count) of wanted positions."""
    if rows is None:
        return [(first, count)]
    runs: list[tuple[int, int]] = []
    for position in range(first, first + count):
        if not rows(which, position):
            continue
        if runs and sum(runs[-1]) == position:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((position, 1))
    return runs


def _copied(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach().to("cpu", copy=True)
    if isinstance(output, tuple):
        return tuple(_copied(o) for o in output)
    return output
