"""Which tokens are computed in the next step.

Requests join and leave at every step. Running sequences come first, single tokens before chunks of prompts; then
waiting ones, in order of arrival, as far as rows, tokens and pages last. Where pages run out the latest arrival is
preempted: it gives its pages back and is computed again later. The earliest is never preempted, so that the work always
ends; if it exhausts the pool alone, it ends there.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from modelmill.core.types import MEAN
from modelmill.runtime.foresight import alike, most_pages
from modelmill.runtime.pace import Pace
from modelmill.runtime.pages import PagePool, PageTables
from modelmill.runtime.sequence import Sequence

LEAST_CHUNK = 128  # prompt tokens that may always join a step: an even number of tiles for the products
CPU_CHUNK = 8  # the same where somebody reads along on a CPU, on which a step costs what its tokens cost
GPU_CHUNK = 512  # and on a GPU, to begin with
FRESH = 2  # tokens of an answer that has only just begun


@dataclass(frozen=True)
class Limits:
    """What a step may hold. tokens, seqs: per step. page_size: tokens per page. prefix: whether prefixes are reused.

    mixed: most tokens of a step that continues running sequences as well; None: as many as in any other. chunk:
    prompt tokens that may join it in any case. fresh: sequences with no more tokens than that have only just begun,
    and wait for the prompts that came with them. foresee: whether whoever would make pages run out later waits now.
    together: prompts that can all run now go first where no answer will be longer than others, whatever ``mixed`` is.
    """

    tokens: int
    seqs: int
    page_size: int
    prefix: bool = True
    mixed: int | None = None
    chunk: int = LEAST_CHUNK
    fresh: int = 0
    foresee: bool = True
    together: bool = False


@dataclass
class Schedule:
    """One step: how many tokens of which sequences, which of them are sampled, and what happens around it.

    copies: (from, to) pages to copy before the step. forks: siblings that share a leader's prompt and are sampled from
    its last row. ended: sequences for which no page can ever be found. rows: running answers that are continued by a
    token each. free: prompts may fill the step as if none were.
    """

    work: list[tuple[Sequence, int]] = field(default_factory=list)
    forks: dict[Sequence, list[Sequence]] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    rows: int = 0
    free: bool = False

    @property
    def tokens(self) -> int:
        """Tokens in the step."""
        return sum(count for _, count in self.work)


class Scheduler:
    """Owns the queues, the pages and the page tables."""

    def __init__(self, limits: Limits, pool: PagePool, width: int) -> None:
        self.limits = limits
        self.pool = pool
        self.tables = PageTables(limits.seqs, width)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self.budget = limits.tokens
        self.pace: Pace | None = None
        self._released = 0
        self._refused: tuple[Sequence, int] | None = None  # whom pages would not last for, and after which release

    def add(self, seq: Sequence) -> None:
        """Queue a sequence by its order of service."""
        if not self.waiting or self.waiting[-1].key < seq.key:
            self.waiting.append(seq)
        else:
            insort(self.waiting, seq, key=lambda s: s.key)

    def schedule(self, *, ahead: bool = False) -> Schedule | None:
        """The next step; empty where there is nothing to do.

        ahead: sampled tokens of the step before are still on the device. None where the decision has to wait for them.
        """
        plan = Schedule()
        picked: dict[Sequence, int] = {}
        left = self.budget
        size = self.limits.page_size
        refs = self.pool.refs
        chunks: list[Sequence] = []
        for seq in list(self.running):
            need = len(seq.tokens) + seq.pending - seq.computed
            if need != 1 or seq.beam is not None:
                chunks.append(seq)
                continue
            if seq.row < 0 or left == 0 or (seq.pending and seq.length >= seq.limit):
                continue
            at = seq.computed // size
            # the common case: the page is there and ours alone
            if (at < len(seq.pages) and refs[seq.pages[at]] == 1) or self._reserve(seq, 1, plan, picked, ahead):
                picked[seq] = 1
                left -= 1
            elif ahead:
                return None
        spent = len(picked)
        budget = self._beside(plan, picked, chunks)
        left = budget - spent
        for seq in chunks:
            if left <= 0:
                break
            if seq.row < 0 or (seq.pending and seq.length >= seq.limit):
                continue
            count = min(self._wanted(seq, left), left)
            if count <= 0:
                continue
            if self._reserve(seq, count, plan, picked, ahead):
                picked[seq] = count
            elif ahead:
                return None
            left = budget - sum(picked.values())
        self._admit(plan, picked, left)
        self._whole_beams(picked)
        plan.work = list(picked.items())
        self._forks(plan)
        if not plan.work and not plan.ended and self.running and not ahead:
            self._unstick(plan)
        return plan

    def interactive(self, mixed: int | None, on_gpu: bool) -> None:
        """Somebody reads along: prompts join running answers in pieces that keep those answers flowing.

        mixed: the most tokens of such a step where that was asked for; otherwise what such steps take decides.

        Who asks is served while there are pages: an answer of somebody else that will be long does not keep them.
        """
        chunk = LEAST_CHUNK if on_gpu else CPU_CHUNK
        self.limits = replace(self.limits, mixed=mixed, chunk=chunk, fresh=FRESH, foresee=False, together=False)
        if mixed is None:
            most = self.limits.tokens
            self.pace = Pace(chunk, most, first=GPU_CHUNK, grain=64) if on_gpu else Pace(chunk, most)

    def timed(self, plan: Schedule, seconds: float) -> None:
        """A step took so long, of which the next ones' pieces follow."""
        if self.pace is None:
            return
        if plan.free:
            self.pace.note_whole(plan.tokens - plan.rows, seconds)
        else:
            self.pace.note(plan.rows, plan.tokens - plan.rows, seconds)

    def _beside(self, plan: Schedule, singles: Collection[Sequence], chunks: list[Sequence]) -> int:
        """Tokens of a step with one token of each of ``singles``: prompts join in pieces beside them.

        Beams need their whole width at once, so that a search that runs lifts the limit. So do answers that have only
        just begun: what came together with them goes together, or the last of them would wait for many small steps.
        Even so a step lasts no longer than somebody who reads along can be asked to wait.
        """
        limits, count = self.limits, len(singles)
        plan.rows, plan.free = count, True
        if (limits.mixed is None and self.pace is None) or any(s.beam is not None for s in chunks):
            return self.budget
        if not count or (limits.fresh and all(s.outputs <= limits.fresh for s in singles)):
            whole = self.budget if self.pace is None else self.pace.whole(self.budget)
            return min(self.budget, count + max(limits.chunk, whole))
        plan.free = False
        if self.pace is None:
            return self.budget if self._at_once() else min(self.budget, max(limits.mixed or 0, count + limits.chunk))
        if not chunks and not self.waiting:
            return self.budget
        return min(self.budget, count + self.pace.room(count))

    def _at_once(self) -> bool:
        """Whether all that waits can run now, with answers that end together: then prompts go first, in whole steps.

        Prompts in pieces let long answers begin early, so that fewer of them are left alone at the end. Where none is
        longer than the others that gains nothing, and an answer's tokens cost more in a step that prompts fill.
        """
        if not self.limits.together or len(self.running) + len(self.waiting) > self.limits.seqs:
            return False
        need = sum(seq.length // self.limits.page_size + 1 for seq in self.waiting)
        return need <= self.pool.available and alike((*self.running, *self.waiting))

    def advance(self, plan: Schedule) -> None:
        """The step is launched: its tokens count as computed, its samples as pending, its forks run."""
        for seq, count in plan.work:
            seq.computed += count
            if seq.computed == seq.length and self.samples(seq):
                seq.pending += 1
        for leader, siblings in plan.forks.items():
            for other in siblings:
                self.share(leader, other)
                other.pending = 1
                self.join(other)
            for other in leader.siblings:
                if other.row < 0 and other.finish is None:
                    self.add(other)
            leader.siblings = []

    @staticmethod
    def samples(seq: Sequence) -> bool:
        """Whether the logits after its last token are wanted."""
        return seq.beam is None and seq.length < seq.limit

    def publish(self, seq: Sequence) -> None:
        """Make the full pages of known, computed tokens findable."""
        size = self.limits.page_size
        full = min(seq.computed, len(seq.tokens)) // size
        if full <= seq.published or not self.limits.prefix or seq.row < 0:
            return
        for page in range(seq.published, full):
            self.pool.publish(seq.pages[page], seq.digest(page, size))
        seq.published = full

    def remove(self, seq: Sequence) -> None:
        """The sequence has ended: off the queues, its pages given back."""
        if seq.row >= 0:
            self.running.remove(seq)
            self._release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def preempt(self, seq: Sequence) -> None:
        """Give the pages of a running sequence back and queue it for recomputation."""
        self.running.remove(seq)
        self._release(seq)
        seq.computed = 0
        seq.published = 0
        self.preemptions += 1
        self.add(seq)

    def share(self, leader: Sequence, other: Sequence) -> None:
        """Let ``other`` start with the pages of ``leader``."""
        for page in leader.pages:
            self.pool.share(page)
        other.pages = list(leader.pages)
        other.computed, other.published = leader.computed, leader.published
        other.row = self.tables.join(other.pages)

    def _release(self, seq: Sequence) -> None:
        self._released += 1
        # last pages first, so that the beginnings of prefixes are evicted last
        for page in reversed(seq.pages):
            self.pool.drop(page)
        seq.pages = []
        self.tables.leave(seq.row)
        seq.row = -1

    def _wanted(self, seq: Sequence, left: int) -> int:
        """Tokens of a running sequence that could go now. Beams wait until all of them are at their last token."""
        need = min(seq.remaining, seq.chunk)
        if seq.beam is None or len(seq.siblings) <= 1:
            return need
        if seq.remaining > 1:
            return min(need, seq.remaining - 1)
        together = all(s.row >= 0 and s.remaining == 1 for s in seq.siblings)
        return 1 if together and (seq is not seq.siblings[0] or left >= len(seq.siblings)) else 0

    def _reserve(self, seq: Sequence, count: int, plan: Schedule, picked: dict[Sequence, int], ahead: bool) -> bool:
        """Pages for ``count`` more tokens, written by this sequence alone; preempts later arrivals if it must."""
        size = self.limits.page_size
        first = seq.computed // size
        last = (seq.computed + count - 1) // size
        for index in range(first, last + 1):
            if index < len(seq.pages) and self.pool.refs[seq.pages[index]] == 1:
                continue
            page = self.pool.take()
            while page is None:
                if ahead or not self._make_room(seq, plan, picked):
                    return False
                page = self.pool.take()
            if index < len(seq.pages):
                old = seq.pages[index]
                plan.copies.append((old, page))
                self.pool.drop(old)
                seq.pages[index] = page
            else:
                seq.pages.append(page)
            self.tables.table[seq.row, index] = page
        return True

    def _make_room(self, seq: Sequence, plan: Schedule, picked: dict[Sequence, int]) -> bool:
        """Preempt the latest arrival; False where that is ``seq`` itself, or ``seq`` is alone and ends."""
        victim = max(self.running, key=lambda s: s.key)
        group = self._group(victim)
        if seq in group:
            if len(group) == len(self.running):
                plan.ended.extend(group)
            else:
                self._preempt_group(group, plan, picked)
            for member in group:
                picked.pop(member, None)
            return False
        self._preempt_group(group, plan, picked)
        return True

    def _preempt_group(self, group: list[Sequence], plan: Schedule, picked: dict[Sequence, int]) -> None:
        for member in group:
            picked.pop(member, None)
            # copies into pages that are given back would overwrite their next owner
            gone = set(member.pages)
            plan.copies = [(a, b) for a, b in plan.copies if b not in gone]
            self.preempt(member)

    def _group(self, seq: Sequence) -> list[Sequence]:
        """The running sequences that only make sense together: the beams of one search."""
        if seq.beam is None:
            return [seq]
        return [s for s in self.running if s.beam is seq.beam]

    def _admit(self, plan: Schedule, picked: dict[Sequence, int], left: int) -> None:
        """Let waiting sequences join, earliest first, while everything lasts."""
        if plan.ended:
            return
        size = self.limits.page_size
        while self.waiting and left > 0:
            seq = self.waiting[0]
            if self._room() < self._width(seq):
                return
            cached = self._match(seq)
            need = -(-seq.length // size) - len(cached)
            if self.running and not self._lasting(seq, need):
                for page in reversed(cached):
                    self.pool.drop(page)
                return
            self.waiting.pop(0)
            first = seq.began is None
            if first:
                seq.began = time.perf_counter()
            seq.pages = cached
            seq.computed = len(cached) * size
            seq.published = len(cached)
            if first:  # one that was thrown out finds its own pages again
                seq.cached = min(seq.computed, seq.prompt_len)
            seq.row = self.tables.join(cached)
            self.join(seq)
            count = min(self._wanted(seq, left), left)
            if count > 0 and self._reserve(seq, count, plan, picked, True):
                picked[seq] = count
                left -= count

    def _lasting(self, seq: Sequence, need: int) -> bool:
        """Whether pages last where ``seq`` joins, which takes ``need`` new ones at first.

        One page beside for each that runs, so that whoever joins is not thrown out at the next full page; and, where it
        is known when answers end, as many as they will hold until then: what is thrown out is computed twice.
        """
        pool = self.pool
        # as long as nobody has given pages back, who was refused is refused again
        if need + len(self.running) > pool.available or self._refused == (seq, self._released):
            return False
        if not self.limits.foresee or seq.beam is not None or any(s.beam is not None for s in self.running):
            return True
        twice = max(0, sum(len(s.pages) for s in self.running) - (pool.count - pool.available))
        if most_pages((*self.running, seq), self.limits.page_size) - twice <= pool.count:
            return True
        self._refused = seq, self._released
        return False

    def join(self, seq: Sequence) -> None:
        """Among the running ones, in order of service."""
        if not self.running or self.running[-1].key < seq.key:
            self.running.append(seq)
        else:
            insort(self.running, seq, key=lambda s: s.key)

    def _room(self) -> int:
        """Rows that are neither used nor promised to a beam search."""
        promised = 0
        seen: set[int] = set()
        for seq in self.running:
            if seq.beam is not None and id(seq.beam) not in seen:
                seen.add(id(seq.beam))
                promised += self._beams(seq) - sum(1 for s in self.running if s.beam is seq.beam)
        return self.tables.free - promised

    def _width(self, seq: Sequence) -> int:
        """Rows that letting ``seq`` in takes."""
        if seq.beam is None:
            return 1
        # the rows of a search that already runs are promised to its members
        return 0 if any(s.beam is seq.beam for s in self.running) else self._beams(seq)

    @staticmethod
    def _beams(seq: Sequence) -> int:
        return seq.request.params.num_beams

    def _match(self, seq: Sequence) -> list[int]:
        """Cached pages with the sequence's beginning, held for it; at least one token is left to compute."""
        if not self.limits.prefix or seq.prompt_logprobs is not None or seq.request.pooling == MEAN:
            return []
        size = self.limits.page_size
        pages: list[int] = []
        for index in range((len(seq.tokens) - 1) // size):
            page = self.pool.find(seq.digest(index, size))
            if page is None:
                break
            self.pool.share(page)
            pages.append(page)
        return pages

    def _whole_beams(self, picked: dict[Sequence, int]) -> None:
        """A beam step needs the logits of all beams: all of them, or none."""
        for seq in list(picked):
            if seq.beam is None or len(seq.siblings) <= 1 or seq.remaining > 1:
                continue
            if any(s not in picked or s.remaining != 1 for s in seq.siblings):
                picked.pop(seq)

    def _forks(self, plan: Schedule) -> None:
        """Siblings (n > 1) start where their leader's prompt ends, as many as there are rows; the rest wait."""
        for seq, count in plan.work:
            if not seq.siblings or seq.beam is not None or seq.computed + count < seq.prompt_len:
                continue
            if not self.samples(seq):
                continue
            room = max(self._room() - sum(len(s) for s in plan.forks.values()), 0)
            plan.forks[seq] = [s for s in seq.siblings if s.finish is None][:room]

    def _unstick(self, plan: Schedule) -> None:
        """Beams that hold pages but can never be together again: the search ends with what it has."""
        if any(s.pending for s in self.running):
            return
        stuck = [s for s in self.running if s.beam is not None]
        if stuck:
            plan.ended.extend(self._group(stuck[0]))
