"""The page pool under any sequence of operations, and prefix keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from modelmill.runtime.kv_pages import PagePool, PageTables, page_key, root_page_key

COUNT = 6


class PoolMachine(RuleBasedStateMachine):
    """Holds stand for sequences' references; ``content`` says what a page is known for, ``had`` who
    was ever taken.
    """

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(COUNT)
        self.ref_counts: dict[int, int] = {}
        self.content: dict[int, bytes] = {}
        self.had: set[int] = set()

    @initialize(max_cached=st.integers(0, COUNT))
    def keep(self, max_cached: int) -> None:
        self.pool = PagePool(COUNT, max_cached)

    @rule(target=holds)
    def take(self) -> int | None:
        idle = self.had & self.content.keys() - self.ref_counts.keys()
        left = self.had - self.ref_counts.keys() - idle
        page = self.pool.alloc_page()
        if page is None:
            assert len(self.ref_counts) == COUNT
            return None
        assert page not in self.ref_counts, "a page that is held was given away"
        if left:
            assert page in left, "a page that was given back is taken first"
        elif len(idle) < max(self.pool.max_idle, 1) and len(self.had) < COUNT:
            assert page not in self.had, (
                "a prefix was forgotten while another page could be had for it"
            )
        else:
            assert page in idle, "an untouched page was allocated although max_idle pages were idle"
        self.had.add(page)
        self.ref_counts[page] = 1
        self.content.pop(page, None)
        return page

    @rule(target=holds, page=holds)
    def share(self, page: int | None) -> int | None:
        if page is not None:
            self.pool.incref(page)
            self.ref_counts[page] += 1
        return page

    @rule(page=consumes(holds))
    def drop(self, page: int | None) -> None:
        if page is None:
            return
        self.pool.decref(page)
        self.ref_counts[page] -= 1
        if not self.ref_counts[page]:
            del self.ref_counts[page]

    @rule(page=holds, key=st.integers(0, 9))
    def publish(self, page: int | None, key: int) -> None:
        digest = bytes([key])
        if page is None:
            return
        known = self.pool.cached_page_for_key(digest)
        self.pool.add_to_prefix_cache(page, digest)
        if known is None and page not in self.content:
            self.content[page] = digest
        else:
            assert self.pool.cached_page_for_key(digest) == known

    @rule(target=holds, key=st.integers(0, 9))
    def reuse(self, key: int) -> int | None:
        page = self.pool.cached_page_for_key(bytes([key]))
        if page is not None:
            assert self.content[page] == bytes([key]), (
                "a prefix was found in a page that holds something else"
            )
            self.pool.incref(page)
            self.ref_counts[page] = self.ref_counts.get(page, 0) + 1
        return page

    @rule()
    def clear_prefix_cache(self) -> None:
        self.pool.clear_prefix_cache()
        self.content.clear()
        assert self.pool.num_cached == 0

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.num_available == COUNT - len(self.ref_counts)
        assert self.pool.num_touched == len(self.had)
        assert self.pool.num_evictable == len(
            self.had & self.content.keys() - self.ref_counts.keys()
        )
        assert [n for n in self.pool.refs if n] == [
            self.ref_counts[p] for p in sorted(self.ref_counts)
        ]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_least_recently_used_goes_first() -> None:
    pool = PagePool(3)
    pages = [pool.alloc_page() for _ in range(3)]
    for i, page in enumerate(pages):
        pool.add_to_prefix_cache(page, bytes([i]))
    for i in (1, 0, 2):
        pool.decref(pages[i])
    pool.incref(pages[1])
    pool.decref(pages[1])
    assert [pool.alloc_page() for _ in range(3)] == [pages[0], pages[2], pages[1]]
    assert pool.alloc_page() is None
    assert pool.num_cached == 0


@pytest.mark.parametrize(("max_cached", "most"), [(None, 40), (12, 13), (1, 2), (0, 2)])
def test_memory_is_what_is_held_at_once_and_what_is_kept(max_cached: int | None, most: int) -> None:
    """However many prefixes come and go, each of two pages."""
    pool = PagePool(40, max_cached)
    for number in range(100):
        pages = [pool.alloc_page(), pool.alloc_page()]
        for place, page in enumerate(pages):
            assert page is not None
            pool.add_to_prefix_cache(page, bytes([number, place]))
        for page in pages:
            pool.decref(page or 0)
    assert pool.num_touched == most
    newest = [pool.cached_page_for_key(bytes([99, place])) for place in (0, 1)]
    assert None not in newest, "the latest is found in any case"


def test_a_page_without_references_cannot_be_dropped() -> None:
    pool = PagePool(1)
    with pytest.raises(AssertionError):
        pool.decref(0)


def test_keys_differ_in_everything_that_matters() -> None:
    start = root_page_key("model", "salt")
    keys = {
        page_key(start, [1, 2], [0]),
        page_key(start, [2, 1], [0]),
        page_key(start, [1, 2], [3]),
        page_key(start, [1, 2], [0, 0]),
        page_key(start, [1, 2, 0], [0]),
        page_key(start, [1, 2], [0], "0:4:image"),
        page_key(root_page_key("model", "other"), [1, 2], [0]),
        page_key(root_page_key("other", "salt"), [1, 2], [0]),
        page_key(root_page_key("models", "alt"), [1, 2], [0]),
        page_key(page_key(start, [1, 2], [0]), [1, 2], [0]),
    }
    assert len(keys) == 10
    assert page_key(start, [1, 2], [0]) == page_key(root_page_key("model", "salt"), (1, 2), (0,))


def test_tables_keep_rows_apart() -> None:
    tables = PageTables(2, 4)
    first, second = tables.alloc_row_with_pages([3, 4]), tables.alloc_row_with_pages([9])
    assert {first, second} == {0, 1}
    assert np.array_equal(tables.table[first, :2], [3, 4])
    assert tables.num_free_rows == 0
    tables.return_row_to_free_list(first)
    assert tables.alloc_row_with_pages([]) == first
