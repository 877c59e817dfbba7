"""Continuous batching: which tokens are computed in the next step.

Requests join and leave at every step. Running sequences come first: decode tokens, then prefill
chunks. Then waiting sequences are admitted in order of arrival, as long as rows, the token budget
and KV pages last. If pages run out, the latest arrival is preempted: its pages are freed and it is
recomputed later. The earliest arrival is never preempted, so that the work always ends; if it
exhausts the pool alone, it ends there.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from modelmill.core.types import POOL_MEAN
from modelmill.runtime.admission import peak_pages, similar_lengths
from modelmill.runtime.chunked_prefill import AdaptiveChunk
from modelmill.runtime.kv_pages import PagePool, PageTables
from modelmill.runtime.sequence import Sequence

# prompt tokens that may always join a step: an even number of tiles for the products
MIN_CHUNK_TOKENS = 128
# the same where somebody reads along on a CPU, on which a step costs what its tokens cost
CPU_CHUNK_TOKENS = 8
GPU_CHUNK_TOKENS = 512  # and on a GPU, to begin with
FRESH_OUTPUT_TOKENS = 2  # tokens of an answer that has only just begun


@dataclass(frozen=True)
class SchedulerLimits:
    """What a step may hold. max_tokens, max_seqs: per step. prefix_caching: whether prefixes are
    reused.

    max_mixed_tokens: most tokens of a step that continues running sequences as well; None: as many
    as in any other. min_chunk_tokens: prompt tokens that may join it in any case.
    fresh_output_tokens: sequences with no more tokens than that have only just begun, and wait for
    the prompts that came with them. reserve_until_finish: whether whoever would make pages run out
    later waits now. prefill_all_first: prompts that can all run now go first where no answer will
    be longer than others, whatever ``max_mixed_tokens`` is.
    """

    max_tokens: int
    max_seqs: int
    page_size: int
    prefix_caching: bool = True
    max_mixed_tokens: int | None = None
    min_chunk_tokens: int = MIN_CHUNK_TOKENS
    fresh_output_tokens: int = 0
    reserve_until_finish: bool = True
    prefill_all_first: bool = False


@dataclass
class Schedule:
    """One step: how many tokens of which sequences, which of them are sampled, and what happens
    around it.

    page_copies: (from, to) pages to copy before the step. forks: siblings that share a leader's
    prompt and are sampled from its last row. out_of_pages: sequences for which no page can ever be
    found. num_decodes: running answers that are continued by a token each. prefill_unlimited:
    prompts may fill the step as if none were.
    """

    work: list[tuple[Sequence, int]] = field(default_factory=list)
    forks: dict[Sequence, list[Sequence]] = field(default_factory=dict)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    out_of_pages: list[Sequence] = field(default_factory=list)
    num_decodes: int = 0
    prefill_unlimited: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return sum(count for _, count in self.work)


class Scheduler:
    """Owns the queues, the pages and the page tables."""

    def __init__(self, limits: SchedulerLimits, pool: PagePool, width: int) -> None:
        self.limits = limits
        self.pool = pool
        self.tables = PageTables(limits.max_seqs, width)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self.step_token_budget = limits.max_tokens
        self.adaptive_chunk: AdaptiveChunk | None = None
        self._num_releases = 0
        # whom pages would not last for, and after which release
        self._last_refusal: tuple[Sequence, int] | None = None

    def add(self, seq: Sequence) -> None:
        """Queue a sequence by its order of service."""
        if not self.waiting or self.waiting[-1].priority < seq.priority:
            self.waiting.append(seq)
        else:
            insort(self.waiting, seq, key=lambda s: s.priority)

    def schedule(self, *, overlapped: bool = False) -> Schedule | None:
        """The next step; empty where there is nothing to do.

        overlapped: sampled tokens of the step before are still on the device. None where the
        decision has to wait for them.
        """
        schedule = Schedule()
        picked: dict[Sequence, int] = {}
        left = self.step_token_budget
        size = self.limits.page_size
        refs = self.pool.refs
        chunks: list[Sequence] = []
        for seq in list(self.running):
            need = len(seq.tokens) + seq.pending - seq.computed
            if need != 1 or seq.beam_search is not None:
                chunks.append(seq)
                continue
            if seq.table_row < 0 or left == 0 or (seq.pending and seq.length >= seq.max_length):
                continue
            at = seq.computed // size
            # the common case: the page is there and ours alone
            if (at < len(seq.pages) and refs[seq.pages[at]] == 1) or self._reserve_pages(
                seq, 1, schedule, picked, overlapped
            ):
                picked[seq] = 1
                left -= 1
            elif overlapped:
                return None
        spent = len(picked)
        budget = self._token_budget(schedule, picked, chunks)
        left = budget - spent
        for seq in chunks:
            if left <= 0:
                break
            if seq.table_row < 0 or (seq.pending and seq.length >= seq.max_length):
                continue
            count = min(self._runnable_tokens(seq, left), left)
            if count <= 0:
                continue
            if self._reserve_pages(seq, count, schedule, picked, overlapped):
                picked[seq] = count
            elif overlapped:
                return None
            left = budget - sum(picked.values())
        self._admit(schedule, picked, left)
        self._drop_partial_beams(picked)
        schedule.work = list(picked.items())
        self._schedule_forks(schedule)
        if not schedule.work and not schedule.out_of_pages and self.running and not overlapped:
            self._end_stuck_beams(schedule)
        return schedule

    def set_interactive(self, max_mixed_tokens: int | None, on_gpu: bool) -> None:
        """Somebody reads along: prompts join running answers in pieces that keep those answers
        flowing.

        max_mixed_tokens: the most tokens of such a step where that was asked for; otherwise what
        such steps take decides.

        Who asks is served while there are pages: an answer of somebody else that will be long does
        not keep them.
        """
        chunk = MIN_CHUNK_TOKENS if on_gpu else CPU_CHUNK_TOKENS
        self.limits = replace(
            self.limits,
            max_mixed_tokens=max_mixed_tokens,
            min_chunk_tokens=chunk,
            fresh_output_tokens=FRESH_OUTPUT_TOKENS,
            reserve_until_finish=False,
            prefill_all_first=False,
        )
        if max_mixed_tokens is None:
            max_tokens = self.limits.max_tokens
            self.adaptive_chunk = (
                AdaptiveChunk(chunk, max_tokens, initial=GPU_CHUNK_TOKENS, alignment=64)
                if on_gpu
                else AdaptiveChunk(chunk, max_tokens)
            )

    def observe_step(self, schedule: Schedule, seconds: float) -> None:
        """A step took so long, of which the next ones' pieces follow."""
        if self.adaptive_chunk is None:
            return
        if schedule.prefill_unlimited:
            self.adaptive_chunk.observe_prefill(schedule.num_tokens - schedule.num_decodes, seconds)
        else:
            self.adaptive_chunk.observe(
                schedule.num_decodes, schedule.num_tokens - schedule.num_decodes, seconds
            )

    def _token_budget(
        self, schedule: Schedule, decodes: Collection[Sequence], chunks: list[Sequence]
    ) -> int:
        """Tokens of a step with one token of each of ``decodes``: prompts join in pieces beside
        them.

        Beams need their whole width at once, so that a search that runs lifts the limit. So do
        answers that have only just begun: what came together with them goes together, or the last
        of them would wait for many small steps. Even so a step lasts no longer than somebody who
        reads along can be asked to wait.
        """
        limits, count = self.limits, len(decodes)
        schedule.num_decodes, schedule.prefill_unlimited = count, True
        if (limits.max_mixed_tokens is None and self.adaptive_chunk is None) or any(
            s.beam_search is not None for s in chunks
        ):
            return self.step_token_budget
        if not count or (
            limits.fresh_output_tokens
            and all(s.num_outputs <= limits.fresh_output_tokens for s in decodes)
        ):
            max_prefill = (
                self.step_token_budget
                if self.adaptive_chunk is None
                else self.adaptive_chunk.max_prefill_tokens(self.step_token_budget)
            )
            return min(self.step_token_budget, count + max(limits.min_chunk_tokens, max_prefill))
        schedule.prefill_unlimited = False
        if self.adaptive_chunk is None:
            return (
                self.step_token_budget
                if self._prefill_all_first()
                else min(
                    self.step_token_budget,
                    max(limits.max_mixed_tokens or 0, count + limits.min_chunk_tokens),
                )
            )
        if not chunks and not self.waiting:
            return self.step_token_budget
        return min(self.step_token_budget, count + self.adaptive_chunk.size_for(count))

    def _prefill_all_first(self) -> bool:
        """Whether all that waits can run now, with answers that end together: then prompts go
        first, in whole steps.

        Prompts in pieces let long answers begin early, so that fewer of them are left alone at the
        end. Where none is longer than the others that gains nothing, and an answer's tokens cost
        more in a step that prompts fill.
        """
        if (
            not self.limits.prefill_all_first
            or len(self.running) + len(self.waiting) > self.limits.max_seqs
        ):
            return False
        need = sum(seq.length // self.limits.page_size + 1 for seq in self.waiting)
        return need <= self.pool.num_available and similar_lengths((*self.running, *self.waiting))

    def advance(self, schedule: Schedule) -> None:
        """The step is launched: its tokens count as computed, its samples as pending, its forks
        run.
        """
        for seq, count in schedule.work:
            seq.computed += count
            if seq.computed == seq.length and self.needs_sampling(seq):
                seq.pending += 1
        for leader, siblings in schedule.forks.items():
            for other in siblings:
                self.share_pages(leader, other)
                other.pending = 1
                self.add_running(other)
            for other in leader.siblings:
                if other.table_row < 0 and other.finish_reason is None:
                    self.add(other)
            leader.siblings = []

    @staticmethod
    def needs_sampling(seq: Sequence) -> bool:
        """Whether the logits after its last token are wanted."""
        return seq.beam_search is None and seq.length < seq.max_length

    def cache_full_pages(self, seq: Sequence) -> None:
        """Make the full pages of known, computed tokens findable."""
        size = self.limits.page_size
        full = min(seq.computed, len(seq.tokens)) // size
        if full <= seq.num_cached_pages or not self.limits.prefix_caching or seq.table_row < 0:
            return
        for page in range(seq.num_cached_pages, full):
            self.pool.cache(seq.pages[page], seq.page_key(page, size))
        seq.num_cached_pages = full

    def remove(self, seq: Sequence) -> None:
        """The sequence has ended: off the queues, its pages given back."""
        if seq.table_row >= 0:
            self.running.remove(seq)
            self._release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def preempt(self, seq: Sequence) -> None:
        """Give the pages of a running sequence back and queue it for recomputation."""
        self.running.remove(seq)
        self._release(seq)
        seq.computed = 0
        seq.num_cached_pages = 0
        self.preemptions += 1
        self.add(seq)

    def share_pages(self, leader: Sequence, other: Sequence) -> None:
        """Let ``other`` start with the pages of ``leader``."""
        for page in leader.pages:
            self.pool.incref(page)
        other.pages = list(leader.pages)
        other.computed, other.num_cached_pages = leader.computed, leader.num_cached_pages
        other.table_row = self.tables.alloc_row(other.pages)

    def _release(self, seq: Sequence) -> None:
        self._num_releases += 1
        # last pages first, so that the beginnings of prefixes are evicted last
        for page in reversed(seq.pages):
            self.pool.decref(page)
        seq.pages = []
        self.tables.free_row(seq.table_row)
        seq.table_row = -1

    def _runnable_tokens(self, seq: Sequence, left: int) -> int:
        """Tokens of a running sequence that could go now.

        Beams wait until all of them are at their last token.
        """
        need = min(seq.remaining, seq.max_chunk)
        if seq.beam_search is None or len(seq.siblings) <= 1:
            return need
        if seq.remaining > 1:
            return min(need, seq.remaining - 1)
        together = all(s.table_row >= 0 and s.remaining == 1 for s in seq.siblings)
        return 1 if together and (seq is not seq.siblings[0] or left >= len(seq.siblings)) else 0

    def _reserve_pages(
        self,
        seq: Sequence,
        count: int,
        schedule: Schedule,
        picked: dict[Sequence, int],
        overlapped: bool,
    ) -> bool:
        """Pages for ``count`` more tokens, written by this sequence alone; preempts later arrivals
        if it must.
        """
        size = self.limits.page_size
        first = seq.computed // size
        last = (seq.computed + count - 1) // size
        for index in range(first, last + 1):
            if index < len(seq.pages) and self.pool.refs[seq.pages[index]] == 1:
                continue
            page = self.pool.alloc()
            while page is None:
                if overlapped or not self._preempt_for(seq, schedule, picked):
                    return False
                page = self.pool.alloc()
            if index < len(seq.pages):
                old = seq.pages[index]
                schedule.page_copies.append((old, page))
                self.pool.decref(old)
                seq.pages[index] = page
            else:
                seq.pages.append(page)
            self.tables.table[seq.table_row, index] = page
        return True

    def _preempt_for(self, seq: Sequence, schedule: Schedule, picked: dict[Sequence, int]) -> bool:
        """Preempt the latest arrival; False where that is ``seq`` itself, or ``seq`` is alone and
        ends.
        """
        victim = max(self.running, key=lambda s: s.priority)
        group = self._beam_group(victim)
        if seq in group:
            if len(group) == len(self.running):
                schedule.out_of_pages.extend(group)
            else:
                self._preempt_group(group, schedule, picked)
            for member in group:
                picked.pop(member, None)
            return False
        self._preempt_group(group, schedule, picked)
        return True

    def _preempt_group(
        self, group: list[Sequence], schedule: Schedule, picked: dict[Sequence, int]
    ) -> None:
        for member in group:
            picked.pop(member, None)
            # copies into pages that are given back would overwrite their next owner
            gone = set(member.pages)
            schedule.page_copies = [(a, b) for a, b in schedule.page_copies if b not in gone]
            self.preempt(member)

    def _beam_group(self, seq: Sequence) -> list[Sequence]:
        """The running sequences that only make sense together: the beams of one search."""
        if seq.beam_search is None:
            return [seq]
        return [s for s in self.running if s.beam_search is seq.beam_search]

    def _admit(self, schedule: Schedule, picked: dict[Sequence, int], left: int) -> None:
        """Let waiting sequences join, earliest first, while everything lasts."""
        if schedule.out_of_pages:
            return
        size = self.limits.page_size
        while self.waiting and left > 0:
            seq = self.waiting[0]
            if self._num_free_rows() < self._rows_needed(seq):
                return
            cached = self._match_prefix(seq)
            need = -(-seq.length // size) - len(cached)
            if self.running and not self._fits_until_finish(seq, need):
                for page in reversed(cached):
                    self.pool.decref(page)
                return
            self.waiting.pop(0)
            first = seq.started_at is None
            if first:
                seq.started_at = time.perf_counter()
            seq.pages = cached
            seq.computed = len(cached) * size
            seq.num_cached_pages = len(cached)
            if first:  # one that was thrown out finds its own pages again
                seq.num_cached = min(seq.computed, seq.prompt_len)
            seq.table_row = self.tables.alloc_row(cached)
            self.add_running(seq)
            count = min(self._runnable_tokens(seq, left), left)
            if count > 0 and self._reserve_pages(seq, count, schedule, picked, True):
                picked[seq] = count
                left -= count

    def _fits_until_finish(self, seq: Sequence, new_pages: int) -> bool:
        """Whether pages last where ``seq`` joins, which takes ``new_pages`` new ones at first.

        One page beside for each that runs, so that whoever joins is not thrown out at the next full
        page; and, where it is known when answers end, as many as they will hold until then: what is
        thrown out is computed twice.
        """
        pool = self.pool
        # as long as nobody has given pages back, who was refused is refused again
        if new_pages + len(self.running) > pool.num_available or self._last_refusal == (
            seq,
            self._num_releases,
        ):
            return False
        if (
            not self.limits.reserve_until_finish
            or seq.beam_search is not None
            or any(s.beam_search is not None for s in self.running)
        ):
            return True
        twice = max(0, sum(len(s.pages) for s in self.running) - (pool.count - pool.num_available))
        if peak_pages((*self.running, seq), self.limits.page_size) - twice <= pool.count:
            return True
        self._last_refusal = seq, self._num_releases
        return False

    def add_running(self, seq: Sequence) -> None:
        """Among the running ones, in order of service."""
        if not self.running or self.running[-1].priority < seq.priority:
            self.running.append(seq)
        else:
            insort(self.running, seq, key=lambda s: s.priority)

    def _num_free_rows(self) -> int:
        """Rows that are neither used nor promised to a beam search."""
        promised = 0
        counted: set[int] = set()
        for seq in self.running:
            if seq.beam_search is not None and id(seq.beam_search) not in counted:
                counted.add(id(seq.beam_search))
                promised += self._num_beams(seq) - sum(
                    1 for s in self.running if s.beam_search is seq.beam_search
                )
        return self.tables.num_free_rows - promised

    def _rows_needed(self, seq: Sequence) -> int:
        """Rows that letting ``seq`` in takes."""
        if seq.beam_search is None:
            return 1
        # the rows of a search that already runs are promised to its members
        return (
            0
            if any(s.beam_search is seq.beam_search for s in self.running)
            else self._num_beams(seq)
        )

    @staticmethod
    def _num_beams(seq: Sequence) -> int:
        return seq.request.params.num_beams

    def _match_prefix(self, seq: Sequence) -> list[int]:
        """Cached pages with the sequence's beginning, held for it; at least one token is left to
        compute.
        """
        if (
            not self.limits.prefix_caching
            or seq.prompt_logprobs is not None
            or seq.request.pooling == POOL_MEAN
        ):
            return []
        size = self.limits.page_size
        pages: list[int] = []
        for index in range((len(seq.tokens) - 1) // size):
            page = self.pool.lookup(seq.page_key(index, size))
            if page is None:
                break
            self.pool.incref(page)
            pages.append(page)
        return pages

    def _drop_partial_beams(self, picked: dict[Sequence, int]) -> None:
        """A beam step needs the logits of all beams: all of them, or none."""
        for seq in list(picked):
            if seq.beam_search is None or len(seq.siblings) <= 1 or seq.remaining > 1:
                continue
            if any(s not in picked or s.remaining != 1 for s in seq.siblings):
                picked.pop(seq)

    def _schedule_forks(self, schedule: Schedule) -> None:
        """Siblings (n > 1) start where their leader's prompt ends, as many as there are rows; the
        rest wait.
        """
        for seq, count in schedule.work:
            if (
                not seq.siblings
                or seq.beam_search is not None
                or seq.computed + count < seq.prompt_len
            ):
                continue
            if not self.needs_sampling(seq):
                continue
            room = max(self._num_free_rows() - sum(len(s) for s in schedule.forks.values()), 0)
            schedule.forks[seq] = [s for s in seq.siblings if s.finish_reason is None][:room]

    def _end_stuck_beams(self, schedule: Schedule) -> None:
        """Beams that hold pages but can never be together again: the search ends with what it
        has.
        """
        if any(s.pending for s in self.running):
            return
        stuck = [s for s in self.running if s.beam_search is not None]
        if stuck:
            schedule.out_of_pages.extend(self._beam_group(stuck[0]))
