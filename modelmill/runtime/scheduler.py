"""Continuous batching: which tokens are computed in the next step.

Requests join and leave at every step, which ``schedule`` fills in two phases:

1. decode: one token of each running sequence whose prompt is computed;
2. prefill: chunks of the running prompts, then waiting sequences are admitted by their priority
   (``Sequence.sort_key``: by default the order of arrival), as long as rows, the token budget and
   KV pages last.

If pages run out, the last by priority is preempted: its pages are freed and it is recomputed later.
The first is never preempted, so that progress is guaranteed; if it exhausts the pool alone, it ends
there.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from modelmill.core.kv_page_counts import (
    first_page_in_use,
    max_extra_step_pages,
    max_pages_between_steps,
    max_sequence_pages,
    max_sequence_pages_in_groups,
)
from modelmill.core.page_groups import sum_group_counts_by_window
from modelmill.core.types import MEAN_POOLING
from modelmill.runtime.admission import have_similar_output_limits, predict_peak_pages
from modelmill.runtime.chunked_prefill import AdaptiveChunkSize
from modelmill.runtime.kv_pages import (
    NO_PAGE,
    PagePool,
    PageTables,
    num_resumable_pages,
    page_group_key,
)
from modelmill.runtime.sequence import Sequence
from modelmill.runtime.state_snapshots import StateSnapshotCache

# prompt tokens that may always join a step: a multiple of the GEMM tile height
MIN_CHUNK_TOKENS = 128
# the same for interactive serving on a CPU, where the time of a step is proportional to its tokens
CPU_MIN_CHUNK_TOKENS = 8
GPU_INITIAL_CHUNK_TOKENS = 512  # initial chunk for interactive serving on a GPU
MAX_JUST_STARTED_OUTPUT_TOKENS = 2  # a sequence with at most so many output tokens has just started


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a step.

    Attributes:
        max_tokens: Per step: activations of so many tokens fit beside the KV cache.
        max_seqs: Per step: rows of the page tables.
        page_size: Tokens of a KV page.
        prefix_caching: Whether cached prefixes are reused.
        max_mixed_tokens: Most tokens of a step that also decodes, whose streams wait for all of it;
            None: ``max_tokens``.
        min_chunk_tokens: Prompt tokens that may join such a step in any case, or prompts would
            never start beside many decodes.
        fresh_output_tokens: Sequences with at most so many output tokens have just started: while
            all decodes are such, prompts may fill the step. 0: never.
        reserve_until_finish: Do not admit a sequence that would make the pages run out before the
            running ones finish (``runtime.admission``).
        prefill_all_first: Run all waiting prompts first, whatever ``max_mixed_tokens`` is, if all
            can run now and their outputs end at about the same time.
        windows: Of each page group: pages behind it are freed; None: full attention. The first
            group keeps its pages longest.
        page_id_strides: Of each page group, how far apart the numbers of two pages are in its page
            tables; empty: 1.
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
    windows: tuple[int | None, ...] = (None,)
    page_id_strides: tuple[int, ...] = ()

    def max_pages_in_use(self, tokens: int) -> int:
        """Most pages that a sequence of ``tokens`` tokens uses at once, in all page groups."""
        return max_sequence_pages_in_groups(tokens, self.page_size, self.windows, self.max_tokens)

    def max_group_pages_in_use(self, tokens: int, window: int | None) -> int:
        """As ``max_pages_in_use``, in a page group with this window."""
        return max_sequence_pages(tokens, self.page_size, window, self.max_tokens)

    def max_batch_pages(self, count: int, tokens: int) -> int:
        """Most pages that ``count`` sequences of ``tokens`` tokens use together."""
        size = self.page_size
        return sum(
            count * max_pages_between_steps(tokens, size, window)
            + min(max_extra_step_pages(self.max_tokens, size, window), count * -(-tokens // size))
            for window in self.windows
        )

    def first_page_in_use(self, computed: int, window: int | None) -> int:
        """The first page that a query behind ``computed`` tokens reads."""
        return first_page_in_use(computed, self.page_size, window)


@dataclass
class Schedule:
    """One step: which sequences run, with how many tokens each.

    Attributes:
        work: (sequence, number of tokens), in the order of the packed batch.
        forks: Leader → siblings (n > 1) that share its prompt and are sampled from its last row.
        page_copies: (from, to) pages to copy before the step (copy on write).
        copied_pages: Of each of them the sequence, the page group, and the page's index in it.
        state_copies: (from, to) slots of recurrent state to copy before the step, in order.
        out_of_pages: Sequences that exhaust the pool alone; they end with this step.
        num_decodes: Sequences that decode one token.
        prefill_unlimited: Prompts may fill the step as if it had no decodes.
    """

    work: list[tuple[Sequence, int]] = field(default_factory=list)
    forks: dict[Sequence, list[Sequence]] = field(default_factory=dict)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    copied_pages: list[tuple[Sequence, int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    out_of_pages: list[Sequence] = field(default_factory=list)
    num_decodes: int = 0
    prefill_unlimited: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return sum(count for _, count in self.work)

    def drop_page_copies_into(self, pages: Collection[int]) -> None:
        """Do not copy into these pages, which have been released."""
        self.page_copies = [(a, b) for a, b in self.page_copies if b not in pages]


class Scheduler:
    """Owns the queues, the pages and the page tables."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        width: int,
        states: StateSnapshotCache | None = None,
    ) -> None:
        """Start without sequences.

        Args:
            limits: Of a step.
            pool: The KV pages.
            width: Most pages of a sequence.
            states: The slots of recurrent state; None for a model that keeps none.
        """
        self.limits = limits
        self.pool = pool
        self.states = states
        steps = limits.page_id_strides or (1,) * len(limits.windows)
        self.tables = PageTables(limits.max_seqs, width, steps)
        self._windowed_groups = [
            (group, window) for group, window in enumerate(limits.windows) if window is not None
        ]
        # the first group last: a page that it has is then there in every group
        self._groups_backwards = range(len(limits.windows) - 1, -1, -1)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self.step_token_budget = limits.max_tokens
        self.adaptive_chunk: AdaptiveChunkSize | None = None
        self._num_releases = 0
        # the last sequence that was not admitted, and the number of releases then: until the next
        # one, predict_peak_pages would refuse it again
        self._last_refusal: tuple[Sequence, int] | None = None

    def add(self, seq: Sequence) -> None:
        """Queue a sequence by its priority."""
        if not self.waiting or self.waiting[-1].sort_key < seq.sort_key:
            self.waiting.append(seq)
        else:
            insort(self.waiting, seq, key=lambda s: s.sort_key)

    def schedule(self, *, overlapped: bool = False) -> Schedule | None:
        """Decide the next step; its ``work`` is empty if there is nothing to run.

        Args:
            overlapped: The sampled tokens of the previous step have not been read yet. Then nothing
                is preempted, since a sequence of that step may just have ended and freed pages.

        Returns:
            The schedule; None if ``overlapped`` and pages are short: decide again once the tokens
            are read.
        """
        schedule = Schedule()
        picked: dict[Sequence, int] = {}
        # decode phase: one token of each running sequence whose prompt is computed; first, because
        # each is one row of the step, and the next token of a stream that is being read
        chunks = self._schedule_decodes(schedule, picked, overlapped)
        if chunks is None:
            self._undo_copy_on_write(schedule)
            return None
        schedule.num_decodes = len(picked)
        # prefill phase: prompts that run continue, then waiting ones are admitted, with the tokens
        # that the decodes' latency leaves
        budget, schedule.prefill_unlimited = self._token_budget_and_prefill_unlimited(
            picked, chunks
        )
        if not self._schedule_chunks(chunks, budget, schedule, picked, overlapped):
            self._undo_copy_on_write(schedule)
            return None
        self._admit_waiting(schedule, picked, budget - sum(picked.values()))
        self._unschedule_incomplete_searches(picked)
        schedule.work = list(picked.items())
        self._schedule_forks(schedule)
        if self.states is not None and schedule.work:  # a step without work is not launched
            schedule.state_copies = self.states.pop_copies()
            if self.limits.prefix_caching:
                for seq, count in schedule.work:
                    self.states.plan_snapshot(seq, count)
        # pages that stuck beams use would never be released: nothing else would ever run
        if not schedule.work and not schedule.out_of_pages and self.running and not overlapped:
            self._end_stuck_beam_search(schedule)
        return schedule

    def _schedule_decodes(
        self, schedule: Schedule, picked: dict[Sequence, int], overlapped: bool
    ) -> list[Sequence] | None:
        """Pick one token of each running sequence that decodes.

        Returns:
            The other running sequences, prompts and beams; None if ``overlapped`` and pages are
            short.
        """
        chunks: list[Sequence] = []
        left = self.step_token_budget
        size, refs = self.limits.page_size, self.pool.refs
        # a copy: _reserve_pages may preempt, which removes from ``running``
        for seq in list(self.running):
            need = len(seq.tokens) + seq.pending - seq.computed
            if need != 1 or seq.beam_search is not None:
                chunks.append(seq)
                continue
            # preempted by an earlier sequence of this loop; no budget; or the unread token is the
            # last one, so that the sequence only waits to be read
            if seq.table_row < 0 or left == 0 or (seq.pending and seq.length >= seq.max_length):
                continue
            page = seq.computed // size
            # the common case: the page exists and is not shared, so nothing has to be reserved; a
            # page that is not full is shared in another group only if it is in the first
            if (page < len(seq.pages) and refs[seq.pages[page]] == 1) or self._reserve_pages(
                seq, 1, schedule, picked, overlapped
            ):
                picked[seq] = 1
                left -= 1
            elif overlapped:
                return None
        return chunks

    def _schedule_chunks(
        self,
        chunks: list[Sequence],
        budget: int,
        schedule: Schedule,
        picked: dict[Sequence, int],
        overlapped: bool,
    ) -> bool:
        """Pick prefill chunks and beams with the tokens of ``budget`` that ``picked`` leaves.

        Returns False if ``overlapped`` and pages are short.
        """
        left = budget - len(picked)
        for seq in chunks:
            if left <= 0:
                break
            if seq.table_row < 0 or (seq.pending and seq.length >= seq.max_length):
                continue
            count = min(self._num_runnable_tokens(seq, left), left)
            count = self._clip_to_page_boundary(seq, count, picked)
            if count <= 0:
                continue
            if self._reserve_pages(seq, count, schedule, picked, overlapped):
                picked[seq] = count
            elif overlapped:
                return False
            # summed again, since _reserve_pages may have preempted sequences in ``picked``
            left = budget - sum(picked.values())
        return True

    def pages_by_window(self) -> dict[str, int]:
        """Pages in use of layers by what they attend to: "all" tokens, or those of a window."""
        pages = sum_group_counts_by_window(self.limits.windows, self.pool.num_in_use_by_group())
        return {"all" if window is None else str(window): n for window, n in pages.items()}

    def set_step_token_budget(self, tokens: int) -> None:
        """Limit the steps from now on to ``tokens``, at most ``limits.max_tokens``."""
        self.step_token_budget = min(tokens, self.limits.max_tokens)

    def optimize_inter_token_latency(
        self, max_mixed_tokens: int | None, on_gpu: bool, step_sizes: tuple[int, ...] = ()
    ) -> None:
        """Optimize for inter-token latency: prompts join decode steps in small chunks.

        Requests are then admitted while there are pages, without a reservation for the long outputs
        of others.

        Args:
            max_mixed_tokens: Most tokens of a step that also decodes; None: the chunk size follows
                measured step times (AdaptiveChunkSize).
            on_gpu: Whether the model runs on a GPU.
            step_sizes: Tokens of a mixed step for which there are CUDA graphs.
        """
        chunk = MIN_CHUNK_TOKENS if on_gpu else CPU_MIN_CHUNK_TOKENS
        self.limits = replace(
            self.limits,
            max_mixed_tokens=max_mixed_tokens,
            min_chunk_tokens=chunk,
            fresh_output_tokens=MAX_JUST_STARTED_OUTPUT_TOKENS,
            reserve_until_finish=False,
            prefill_all_first=False,
        )
        if max_mixed_tokens is None:
            max_tokens = self.limits.max_tokens
            self.adaptive_chunk = (
                AdaptiveChunkSize(
                    chunk, max_tokens, initial=GPU_INITIAL_CHUNK_TOKENS, step_sizes=step_sizes
                )
                if on_gpu
                else AdaptiveChunkSize(chunk, max_tokens)
            )

    def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes, while no sequence runs."""
        self.pool.clear_prefix_cache()
        if self.states is not None:
            self.states.drop_all_snapshots()

    def observe_step(self, schedule: Schedule, seconds: float) -> None:
        """Report the duration of a step, which the size of the next chunks follows."""
        if self.adaptive_chunk is None:
            return
        if schedule.prefill_unlimited:
            self.adaptive_chunk.observe_prefill(schedule.num_tokens - schedule.num_decodes, seconds)
        else:
            self.adaptive_chunk.observe_decoding_step(
                schedule.num_decodes, schedule.num_tokens - schedule.num_decodes, seconds
            )

    def _token_budget_and_prefill_unlimited(
        self, decodes: Collection[Sequence], chunks: list[Sequence]
    ) -> tuple[int, bool]:
        """Most tokens of a step that decodes one token of each of ``decodes`` and prefills.

        Also returns whether prompts may fill it as if it had no decodes.

        There is no limit while a beam search runs, whose beams must run in one step. It is nearly
        lifted while all decodes have just started: requests that arrived together are prefilled
        together, or the last of them would wait for many small steps. AdaptiveChunkSize still
        bounds the duration of such a step.
        """
        limits, count = self.limits, len(decodes)
        if (limits.max_mixed_tokens is None and self.adaptive_chunk is None) or any(
            s.beam_search is not None for s in chunks
        ):
            return self.step_token_budget, True
        if not count or (
            limits.fresh_output_tokens
            and all(s.num_outputs <= limits.fresh_output_tokens for s in decodes)
        ):
            max_prefill = (
                self.step_token_budget
                if self.adaptive_chunk is None
                else self.adaptive_chunk.max_prefill_tokens(self.step_token_budget)
            )
            most = count + max(limits.min_chunk_tokens, max_prefill)
            return min(self.step_token_budget, most), True
        return min(self.step_token_budget, self._mixed_step_token_budget(count, chunks)), False

    def _mixed_step_token_budget(self, num_decodes: int, chunks: list[Sequence]) -> int:
        """Most tokens of a step in which prompts join decodes that must not wait for them."""
        if self.adaptive_chunk is None:
            least = num_decodes + self.limits.min_chunk_tokens
            return (
                self.step_token_budget
                if self._should_prefill_all_first()
                else max(self.limits.max_mixed_tokens or 0, least)
            )
        if not chunks and not self.waiting:
            return self.step_token_budget
        return num_decodes + self.adaptive_chunk.next_chunk_tokens(num_decodes)

    def _should_prefill_all_first(self) -> bool:
        """Whether to prefill all waiting prompts first, in full steps.

        True if all of them can run now and their outputs end at about the same time. Chunks let
        long outputs start early, so that fewer of them run alone at the end; with equal lengths
        that gains nothing, and a decode token costs more in a step that prompts fill.
        """
        if (
            not self.limits.prefill_all_first
            or len(self.running) + len(self.waiting) > self.limits.max_seqs
        ):
            return False
        need = sum(self.limits.max_pages_in_use(seq.length + 1) for seq in self.waiting)
        return need <= self.pool.num_available and have_similar_output_limits(
            (*self.running, *self.waiting)
        )

    def update_after_launch(self, schedule: Schedule) -> None:
        """Update the sequences after a launch: computed and pending tokens, forks.

        The results are not read yet; the next schedule only needs these counts.
        """
        for seq, count in schedule.work:
            seq.advance(count)
            if self._windowed_groups:
                if self.limits.prefix_caching:
                    self.cache_full_pages(seq)
                self.free_pages_outside_window(seq, cached_only=self.limits.prefix_caching)
            if seq.computed == seq.length and self.samples_next_token(seq):
                seq.add_pending_token()
        for leader, siblings in schedule.forks.items():
            for other in siblings:
                self.share_pages(leader, other)
                other.add_pending_token()
                self.add_running(other)
            for other in leader.pop_siblings():
                if other.table_row < 0 and other.finish_reason is None:
                    self.add(other)

    @staticmethod
    def samples_next_token(seq: Sequence) -> bool:
        """Whether a token is sampled from the logits of its last token."""
        return seq.beam_search is None and seq.length < seq.max_length

    def cache_full_pages(self, seq: Sequence) -> None:
        """Publish full pages of known, computed tokens in the prefix cache."""
        size = self.limits.page_size
        full = min(seq.computed, len(seq.tokens)) // size
        if full <= seq.num_cached_pages or not self.limits.prefix_caching or seq.table_row < 0:
            return
        for page in range(seq.num_cached_pages, full):
            key = seq.page_key(page, size)
            for group, pages in enumerate(seq.group_pages):
                self.pool.add_to_prefix_cache(pages[page], page_group_key(key, group))
        seq.note_cached_pages(full)
        if self.states is not None:
            self.states.cache_snapshots(seq, full * size)

    def free_pages_outside_window(self, seq: Sequence, *, cached_only: bool = False) -> None:
        """Free the pages that no query of the sequence will read again.

        The launched step reads them before a later one writes.

        Args:
            seq: A running sequence.
            cached_only: Keep pages that the prefix cache does not know yet.
        """
        for group, window in self._windowed_groups:
            pages = seq.group_pages[group]
            first = min(self.limits.first_page_in_use(seq.computed, window), len(pages) - 1)
            if cached_only:
                first = min(first, seq.num_cached_pages)
            freed = seq.num_freed_pages[group]
            if first <= freed:
                continue
            for page in pages[freed:first]:
                self.pool.decref(page)
            seq.note_freed_pages(group, first)
            self.tables.alias_freed_entries(seq.table_row, pages, first, group)
            self._num_releases += 1

    def remove(self, seq: Sequence) -> None:
        """Take an ended sequence off the queues and release its pages."""
        if seq.table_row >= 0:
            self.running.remove(seq)
            self._release_pages_and_row(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def preempt(self, seq: Sequence) -> None:
        """Release the pages of a running sequence and queue it for recomputation."""
        self.running.remove(seq)
        self._release_pages_and_row(seq)
        seq.reset_for_recompute()
        self.preemptions += 1
        self.add(seq)

    def share_pages(self, leader: Sequence, other: Sequence) -> None:
        """Let ``other`` start with the pages of ``leader``."""
        for page in leader.pages_in_use:
            self.pool.incref(page)
        group_pages = [list(pages) for pages in leader.group_pages]
        row = self.tables.alloc_row_with_pages(*group_pages)
        other.attach_pages(group_pages, row, leader.computed, leader.num_cached_pages)
        if self.states is not None:
            self.states.queue_state_copy(leader.table_row, row)

    def _release_pages_and_row(self, seq: Sequence) -> None:
        self._num_releases += 1
        # last pages first, so that the beginnings of prefixes are evicted last
        for page in reversed(seq.pages_in_use):
            self.pool.decref(page)
        if self.states is not None:
            self.states.free_planned_slots(seq)
        self.tables.return_row_to_free_list(seq.table_row)
        seq.clear_pages_and_row()

    def _num_runnable_tokens(self, seq: Sequence, left: int) -> int:
        """Tokens of a running sequence that the next step may compute.

        The last tokens of all beams of a search must run in one step, which compares their logits.
        """
        need = min(seq.num_uncomputed, seq.max_chunk)
        if seq.beam_search is None or len(seq.siblings) <= 1:
            return need
        if seq.num_uncomputed > 1:  # recomputed after a preemption: all but the last token
            return min(need, seq.num_uncomputed - 1)
        all_ready = all(s.table_row >= 0 and s.num_uncomputed == 1 for s in seq.siblings)
        return 1 if all_ready and (seq is not seq.siblings[0] or left >= len(seq.siblings)) else 0

    def _clip_to_page_boundary(self, seq: Sequence, count: int, picked: dict[Sequence, int]) -> int:
        """How many of ``count`` tokens a step takes: with recurrent state, up to a full page."""
        if (
            self.states is None
            or count <= 0
            or seq.num_uncomputed == 1
            or seq.beam_search is not None
        ):
            return count
        if self.step_token_budget < self.limits.page_size:
            return count
        return self.states.clip_to_page_boundary(
            seq, count, self.step_token_budget - sum(picked.values())
        )

    def _reserve_pages(
        self,
        seq: Sequence,
        count: int,
        schedule: Schedule,
        picked: dict[Sequence, int],
        overlapped: bool,
    ) -> bool:
        """Reserve unshared pages for ``count`` more tokens of a sequence.

        A shared page is replaced by a copy (copy on write). Preempts later arrivals if pages run
        out, unless ``overlapped``. Returns False if no page was found.
        """
        size = self.limits.page_size
        first = seq.computed // size
        last = (seq.computed + count - 1) // size
        for group in self._groups_backwards:
            pages = seq.group_pages[group]
            for index in range(first, last + 1):
                if index < len(pages) and self.pool.refs[pages[index]] == 1:
                    continue
                page = self.pool.alloc_page(group)
                while page is None:
                    if overlapped or not self._preempt_latest_for(seq, schedule, picked):
                        return False
                    page = self.pool.alloc_page(group)
                if index < len(pages):
                    # shared with a fork: the copy runs before the step that writes into it
                    old = pages[index]
                    schedule.page_copies.append((old, page))
                    schedule.copied_pages.append((seq, group, index))
                    self.pool.decref(old)
                    pages[index] = page
                else:
                    pages.append(page)
                self.tables.set_page(seq.table_row, index, page, group)
        return True

    def extend_pages(self, seq: Sequence, count: int) -> None:
        """Give a sequence pages for ``count`` more tokens, which must be free."""
        reserved = self._reserve_pages(seq, count, Schedule(), {}, overlapped=True)
        assert reserved, "the caller has counted the free pages"

    def _undo_copy_on_write(self, schedule: Schedule) -> None:
        """Take back the copies on write of an overlapped schedule that is not launched.

        Otherwise the sequences would read their new pages, into which nothing was copied. Pages
        that were appended stay: nothing has been read from them yet.
        """
        # nothing is preempted in an overlapped schedule, so both lists are of the same copies
        for (seq, group, index), (old, page) in zip(
            schedule.copied_pages, schedule.page_copies, strict=True
        ):
            self.pool.incref(old)
            self.pool.decref(page)
            seq.group_pages[group][index] = old
            self.tables.set_page(seq.table_row, index, old, group)

    def _preempt_latest_for(
        self, seq: Sequence, schedule: Schedule, picked: dict[Sequence, int]
    ) -> bool:
        """Preempt the latest arrival to get pages for ``seq``.

        Returns False if ``seq`` is that arrival; if it also runs alone, it ends out of pages.
        """
        # the latest arrival has computed least, and the earliest always progresses
        victim = max(self.running, key=lambda s: s.sort_key)
        group = self._beam_group(victim)
        if seq in group:
            if len(group) == len(self.running):  # recomputing it alone would run out again
                schedule.out_of_pages.extend(group)
            else:
                self._preempt_sequences(group, schedule, picked)
            for member in group:
                picked.pop(member, None)
            return False
        self._preempt_sequences(group, schedule, picked)
        return True

    def _preempt_sequences(
        self, group: list[Sequence], schedule: Schedule, picked: dict[Sequence, int]
    ) -> None:
        for member in group:
            picked.pop(member, None)
            # a copy into a released page would overwrite the data of its next owner
            schedule.drop_page_copies_into(set(member.pages_in_use))
            self.preempt(member)

    def _beam_group(self, seq: Sequence) -> list[Sequence]:
        """The running sequences that are preempted together: the beams of a search."""
        if seq.beam_search is None:
            return [seq]
        return [s for s in self.running if s.beam_search is seq.beam_search]

    def _admit_waiting(self, schedule: Schedule, picked: dict[Sequence, int], left: int) -> None:
        """Admit waiting sequences, earliest first, while rows, tokens and pages last."""
        if schedule.out_of_pages:
            return
        size = self.limits.page_size
        while self.waiting and left > 0:
            seq = self.waiting[0]
            # strictly in order: a smaller request behind it would let a large one wait forever
            if self._num_free_table_rows() < self._num_table_rows_needed(seq):
                return
            cached = self._acquire_cached_prefix(seq)
            need = self._pages_needed(seq, cached)
            if self.running and not self._pages_last_until_finish(seq, need):
                self._release_prefix(cached)
                return
            self.waiting.pop(0)
            row, num_cached = self.tables.alloc_row_with_pages(*cached), len(cached[0])
            seq.attach_pages(cached, row, num_cached * size, num_cached)
            if self.states is not None and num_cached:
                self.states.queue_snapshot_restore(seq.page_key(num_cached - 1, size), row)
            if seq.started_at is None:
                seq.note_admission(time.perf_counter())
            self.add_running(seq)
            count = min(self._num_runnable_tokens(seq, left), left)
            count = self._clip_to_page_boundary(seq, count, picked)
            # overlapped=True: a new sequence never preempts one that runs
            if count > 0 and self._reserve_pages(seq, count, schedule, picked, True):
                picked[seq] = count
                left -= count

    def _release_prefix(self, cached: list[list[int]]) -> None:
        """Give a prefix's references back, last page first, as ``_release_pages_and_row`` does."""
        for index in range(len(cached[0]) - 1, -1, -1):
            for pages in cached:
                if pages[index] != NO_PAGE:
                    self.pool.decref(pages[index])

    def _pages_needed(self, seq: Sequence, cached: list[list[int]]) -> int:
        """Pages that a sequence takes when it is admitted, beside those of its cached prefix."""
        need = 0
        for pages, window in zip(cached, self.limits.windows, strict=True):
            full = -(-seq.length // self.limits.page_size) - len(pages)
            in_use = len(pages) - pages.count(NO_PAGE)
            need += min(full, self.limits.max_group_pages_in_use(1 << 62, window) - in_use)
        return need

    def _pages_last_until_finish(self, seq: Sequence, new_pages: int) -> bool:
        """Whether the pages last if ``seq`` is admitted, which takes ``new_pages`` at first.

        Keeps one page per running sequence free, so that the new one is not preempted at the next
        full page; and, where the output lengths are known, the pages that all need until they
        finish, because a preempted sequence is computed twice.
        """
        pool = self.pool
        # the last refusal stays valid until a sequence releases pages
        growth = len(self.running) * len(self.limits.windows)
        if new_pages + growth > pool.num_available or self._last_refusal == (
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
        # predict_peak_pages counts a shared page once per sequence
        in_use = sum(len(s.pages) - s.num_freed_pages[0] for s in self.running)
        if len(self.limits.windows) > 1:
            in_use = sum(s.num_pages_in_use for s in self.running)
        shared = max(0, in_use - (pool.count - pool.num_available))
        limits = self.limits
        peak = predict_peak_pages(
            (*self.running, seq), limits.page_size, limits.windows, limits.max_tokens
        )
        if peak - shared <= pool.count:
            return True
        self._last_refusal = seq, self._num_releases
        return False

    def add_running(self, seq: Sequence) -> None:
        """Insert a sequence into ``running`` by its priority."""
        if not self.running or self.running[-1].sort_key < seq.sort_key:
            self.running.append(seq)
        else:
            insort(self.running, seq, key=lambda s: s.sort_key)

    def _num_free_table_rows(self) -> int:
        """Rows that are neither used nor reserved for the beams of a running search."""
        reserved = 0
        counted: set[int] = set()
        for seq in self.running:
            if seq.beam_search is not None and id(seq.beam_search) not in counted:
                counted.add(id(seq.beam_search))
                reserved += seq.request.params.num_beams - sum(
                    1 for s in self.running if s.beam_search is seq.beam_search
                )
        return self.tables.num_free_rows - reserved

    def _num_table_rows_needed(self, seq: Sequence) -> int:
        """Rows that admitting ``seq`` takes."""
        if seq.beam_search is None:
            return 1
        # the rows of a running search are already reserved for its beams
        return (
            0
            if any(s.beam_search is seq.beam_search for s in self.running)
            else seq.request.params.num_beams
        )

    def _acquire_cached_prefix(self, seq: Sequence) -> list[list[int]]:
        """Look up the cached pages of the sequence's prefix and take a reference to each.

        At least one token is left to compute, for its logits. Returns the pages of each page group.
        """
        # prompt logprobs and mean pooling need every row of the prompt
        if (
            not self.limits.prefix_caching
            or seq.prompt_logprobs is not None
            or seq.request.pooling == MEAN_POOLING
        ):
            return [[] for _ in self.limits.windows]
        if self._windowed_groups:
            return self._acquire_windowed_prefix(seq)
        size = self.limits.page_size
        pages: list[int] = []
        for index in range((len(seq.tokens) - 1) // size):
            page = self.pool.cached_page_for_key(seq.page_key(index, size))
            if page is None:
                break
            self.pool.incref(page)
            pages.append(page)
        return [
            pages if self.states is None else self._truncate_to_snapshot(self.states, seq, pages)
        ]

    def _acquire_windowed_prefix(self, seq: Sequence) -> list[list[int]]:
        """As ``_acquire_cached_prefix``, where queries of some layers read only a window.

        The longest prefix whose pages inside each group's window are cached; NO_PAGE stands for the
        others.
        """
        size = self.limits.page_size
        keys = [seq.page_key(index, size) for index in range((len(seq.tokens) - 1) // size)]
        count = num_resumable_pages(self.pool, keys, size, self.limits.windows)
        cached = []
        for group, window in enumerate(self.limits.windows):
            first = self.limits.first_page_in_use(count * size, window)
            group_keys = (page_group_key(key, group) for key in keys[first:count])
            inside = [self.pool.cached_page_for_key(key) for key in group_keys]
            pages = [page for page in inside if page is not None]
            for page in pages:
                self.pool.incref(page)
            cached.append([NO_PAGE] * first + pages)
        return cached

    def _truncate_to_snapshot(
        self, states: StateSnapshotCache, seq: Sequence, pages: list[int]
    ) -> list[int]:
        """The cached pages in front of the latest snapshot of the state; releases the others."""
        size = self.limits.page_size
        count = states.num_pages_before_snapshot([seq.page_key(i, size) for i in range(len(pages))])
        for page in reversed(pages[count:]):
            self.pool.decref(page)
        seq.set_restored_prefix(count * size, len(pages) * size if len(pages) > count else 0)
        return pages[:count]

    def _unschedule_incomplete_searches(self, picked: dict[Sequence, int]) -> None:
        """Remove the beams of a search of which not all are scheduled."""
        for seq in list(picked):
            if seq.beam_search is None or len(seq.siblings) <= 1 or seq.num_uncomputed > 1:
                continue
            if any(s not in picked or s.num_uncomputed != 1 for s in seq.siblings):
                picked.pop(seq)

    def _schedule_forks(self, schedule: Schedule) -> None:
        """Fork the siblings (n > 1) at the end of the leader's prompt, as far as rows last.

        The others are queued by ``advance``.
        """
        for seq, count in schedule.work:
            if (
                not seq.siblings
                or seq.beam_search is not None
                or seq.computed + count < seq.prompt_len
            ):
                continue
            if not self.samples_next_token(seq):
                continue
            rows = max(
                self._num_free_table_rows() - sum(len(s) for s in schedule.forks.values()), 0
            )
            schedule.forks[seq] = [s for s in seq.siblings if s.finish_reason is None][:rows]

    def _end_stuck_beam_search(self, schedule: Schedule) -> None:
        """End a search whose beams use pages but can never all run again, with what it has."""
        if any(s.pending for s in self.running):
            return
        stuck = [s for s in self.running if s.beam_search is not None]
        if stuck:
            schedule.out_of_pages.extend(self._beam_group(stuck[0]))
