"""The scheduler's pages of several page groups: every query reads what its own tokens wrote."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.kv_page_counts import max_extra_step_pages, max_pages_between_steps
from modelmill.core.page_groups import (
    MAX_PAGE_GROUPS,
    layer_slots_per_page,
    plan_page_groups,
    sum_group_counts_by_window,
)
from modelmill.core.types import Request
from modelmill.runtime.kv_pages import NO_PAGE, PagePool
from modelmill.runtime.scheduler import Schedule, Scheduler, SchedulerLimits
from modelmill.runtime.sequence import RopeFrequencyRule, Sequence
from tests.hypothesis_examples import examples
from tests.runtime import tiny

RULE = RopeFrequencyRule("fixed", lambda _: 0)
BASE = tuple(range(100, 190))  # prompts begin with a part of it, so that they share prefixes
WINDOWS = ((None, 5), (None, 12, 12), (None, None, 7), (None, 20, 9, 9, 3), (None,), (6,))


@dataclass
class PagedMemory:
    """What was written to each slot of each page: all tokens up to that one, as a hash."""

    scheduler: Scheduler
    pages: dict[int, dict[int, int]] = field(default_factory=dict)

    def run(self, schedule: Schedule) -> None:
        """Copy, write the keys of a step, then let each query read its window in every group."""
        for source, target in schedule.page_copies:
            self.pages[target] = dict(self.pages.get(source, {}))
        for seq, count in schedule.work:
            prefixes = _prefix_hashes(seq.tokens)
            for group, window in enumerate(self.scheduler.limits.windows):
                self._write(seq, group, count, prefixes)
                for query in range(seq.computed, seq.computed + count):
                    first = 0 if window is None else max(query - window + 1, 0)
                    for position in range(first, query + 1):
                        assert self._read(seq, group, position) == prefixes[position]

    def _write(self, seq: Sequence, group: int, count: int, prefixes: list[int]) -> None:
        size, refs = self.scheduler.limits.page_size, self.scheduler.pool.refs
        for position in range(seq.computed, seq.computed + count):
            page = self._page(seq, group, position)
            assert refs[page] == 1, "a page that is written to has one owner"
            self.pages.setdefault(page, {})[position % size] = prefixes[position]

    def _read(self, seq: Sequence, group: int, position: int) -> int | None:
        page = self._page(seq, group, position)
        return self.pages[page].get(position % self.scheduler.limits.page_size)

    def _page(self, seq: Sequence, group: int, position: int) -> int:
        table = self.scheduler.tables.tables[group]
        return int(table[seq.table_row, position // self.scheduler.limits.page_size])


def _prefix_hashes(tokens: Seq[int]) -> list[int]:
    hashes, last = [], 0
    for token in tokens:
        last = hash((last, token))
        hashes.append(last)
    return hashes


def check_owners(scheduler: Scheduler) -> None:
    """A page has one reference from each sequence that uses it, and one group."""
    references = [0] * scheduler.pool.count
    groups: dict[int, int] = {}
    for seq in scheduler.running:
        assert seq.group_pages[0] is seq.pages
        assert len(seq.pages) == min(map(len, seq.group_pages)), "the first group is filled last"
        assert seq.num_pages_in_use == len(seq.pages_in_use)
        for group, pages in enumerate(seq.group_pages):
            for page in pages:
                if page != NO_PAGE:
                    references[page] += 1
                    assert groups.setdefault(page, group) == group
    assert references == scheduler.pool.refs
    assert sum(scheduler.pool.num_in_use_by_group()) == sum(map(bool, references))


def planned_pages(scheduler: Scheduler) -> int:
    """Most pages that the running sequences use, as admission and the plan count them."""
    limits = scheduler.limits
    return sum(
        max_extra_step_pages(limits.max_tokens, limits.page_size, window)
        + sum(
            max_pages_between_steps(seq.length + 1, limits.page_size, window)
            for seq in scheduler.running
        )
        for window in limits.windows
    )


def make_sequence(number: int, prompt: tuple[int, ...], outputs: int, forks: int) -> Sequence:
    params = tiny.params(max_tokens=outputs, ignore_eos=number % 2 == 0)
    request = Request(id=str(number), prompt=prompt, params=params, eos_ids=(2,))
    limit = len(prompt) + outputs
    leader = Sequence(request, 0, number, RULE, max_length=limit)
    leader.set_siblings([leader.fork(index, 0) for index in range(1, forks)])
    return leader


def run_all(scheduler: Scheduler, works: list[tuple[int, int, int, int]]) -> None:
    """Serve works (tokens of BASE, further tokens, outputs, forks), a new one every other step."""
    memory = PagedMemory(scheduler)
    works = list(works)
    for step in range(3000):
        if works and step % 2 == 0:
            shared, own, outputs, forks = works.pop()
            prompt = (*BASE[:shared], *(1000 * step + n for n in range(own + 1)))
            scheduler.add(make_sequence(step, prompt, outputs, forks))
        if not (works or scheduler.running or scheduler.waiting):
            return
        schedule = scheduler.schedule()
        assert schedule is not None
        assert not schedule.out_of_pages
        memory.run(schedule)
        in_use = scheduler.pool.count - scheduler.pool.num_available
        assert in_use <= planned_pages(scheduler)
        scheduler.update_after_launch(schedule)
        check_owners(scheduler)
        for seq in list(scheduler.running):
            if seq.pending:
                seq.append_sampled(5 + (seq.length * 7 + seq.index) % 11)
                scheduler.cache_full_pages(seq)
            if seq.length >= seq.max_length:
                scheduler.remove(seq)
    raise AssertionError("the scheduler still has work")


@given(
    windows=st.sampled_from(WINDOWS),
    page_size=st.sampled_from([1, 4, 8]),
    max_tokens=st.integers(3, 40),
    prefix_caching=st.booleans(),
    reserve=st.booleans(),
    spare_pages=st.integers(0, 40),
    max_idle=st.none() | st.integers(0, 30),
    works=st.lists(
        st.tuples(
            st.integers(0, len(BASE)), st.integers(0, 8), st.integers(1, 40), st.integers(1, 3)
        ),
        min_size=1,
        max_size=7,
    ),
)
@settings(deadline=None, max_examples=examples(150, 20))
def test_every_query_reads_what_its_tokens_wrote(
    windows: tuple[int | None, ...],
    page_size: int,
    max_tokens: int,
    prefix_caching: bool,
    reserve: bool,
    spare_pages: int,
    max_idle: int | None,
    works: list[tuple[int, int, int, int]],
) -> None:
    limits = SchedulerLimits(
        max_tokens, 4, page_size, prefix_caching, reserve_until_finish=reserve, windows=windows
    )
    longest = max(shared + own + 1 + outputs for shared, own, outputs, _ in works)
    count = limits.max_pages_in_use(longest) + spare_pages
    pool = PagePool(count, max_idle, len(windows))
    scheduler = Scheduler(limits, pool, longest // page_size + 2)
    run_all(scheduler, works)
    assert pool.num_available == count
    assert not any(pool.refs)
    assert pool.num_in_use_by_group() == [0] * len(windows)
    assert scheduler.tables.num_free_rows == 4


LAYERS = st.lists(st.sampled_from([None, 128, 1024]), min_size=1, max_size=80)
SIZES = st.sampled_from([{}, {None: 512, 128: 256}, {None: 1024, 1024: 2048}, {None: 3, 128: 7}])


@given(windows=LAYERS, max_tokens=st.integers(1, 1 << 18), size_by_window=SIZES)
def test_groups_have_every_layer_once_and_save_memory(
    windows: list[int | None], max_tokens: int, size_by_window: dict[int | None, int]
) -> None:
    sizes = [size_by_window.get(window, 256) for window in windows] if size_by_window else []
    groups = plan_page_groups(windows, max_tokens, sizes)
    if not groups:
        return
    assert sorted(layer for group in groups for layer in group.layers) == [*range(len(windows))]
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert 2 <= len(groups) <= MAX_PAGE_GROUPS
    tokens = [1 << 20 if group.window is None else group.window for group in groups]
    assert tokens == sorted(tokens, reverse=True)
    sizes = sizes or [1] * len(windows)
    place = {sizes[layer] * group.layers_per_slot for group in groups for layer in group.layers}
    assert len(place) == 1, "a page of every group takes the same memory"
    per_token = place.pop() * layer_slots_per_page(groups)
    for group in groups:
        assert sum(sizes[layer] for layer in group.layers) <= per_token
    per_sequence = per_token * sum(min(each, max_tokens) for each in tokens)
    assert per_sequence < sum(sizes) * max_tokens


def test_groups_of_published_models() -> None:
    gemma3_27b = [None if (layer + 1) % 6 == 0 else 1024 for layer in range(62)]
    groups = plan_page_groups(gemma3_27b, 32768)
    assert [(len(group.layers), group.window) for group in groups] == [
        (10, None), *[(10, 1024)] * 5, (2, 1024),
    ]  # fmt: skip
    gpt_oss = [None if layer % 2 else 128 for layer in range(24)]
    assert [len(group.layers) for group in plan_page_groups(gpt_oss, 32768)] == [12, 12]
    assert plan_page_groups(gemma3_27b, 1024) == ()
    # Gemma 4 E2B's layers with a cache, and 31B's, in which full attention has the smaller keys
    e2b = [None if (layer + 1) % 5 == 0 else 512 for layer in range(15)]
    groups = plan_page_groups(e2b, 32768, [256 if window else 512 for window in e2b])
    assert [(len(group.layers), group.layers_per_slot) for group in groups] == [
        (3, 1),
        (6, 2),
        (6, 2),
    ]
    big = [None if (layer + 1) % 6 == 0 else 1024 for layer in range(60)]
    groups = plan_page_groups(big, 32768, [4096 if window else 2048 for window in big])
    assert [(len(group.layers), group.layers_per_slot) for group in groups] == [
        (10, 2), *[(8, 1)] * 6, (2, 1),
    ]  # fmt: skip
    assert plan_page_groups([4096] * 32, 32768) == plan_page_groups([None] * 32, 32768) == ()


def test_groups_of_one_window_are_summed() -> None:
    assert sum_group_counts_by_window((None, 12, 12, 5), (3, 4, 5, 6)) == {None: 3, 12: 9, 5: 6}
