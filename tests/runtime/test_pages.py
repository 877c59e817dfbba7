"""The page pool under any sequence of operations, and prefix keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from modelmill.runtime.pages import PagePool, PageTables, chain, root

COUNT = 6


class PoolMachine(RuleBasedStateMachine):
    """Holds stand for sequences' references; ``content`` says what a page is known for, ``had`` who was ever taken."""

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(COUNT)
        self.held: dict[int, int] = {}
        self.content: dict[int, bytes] = {}
        self.had: set[int] = set()

    @initialize(kept=st.integers(0, COUNT))
    def keep(self, kept: int) -> None:
        self.pool = PagePool(COUNT, kept)

    @rule(target=holds)
    def take(self) -> int | None:
        idle = self.had & self.content.keys() - self.held.keys()
        left = self.had - self.held.keys() - idle
        page = self.pool.take()
        if page is None:
            assert len(self.held) == COUNT
            return None
        assert page not in self.held, "a page that is held was given away"
        if left:
            assert page in left, "a page that was given back is taken first"
        elif len(idle) < max(self.pool.kept, 1) and len(self.had) < COUNT:
            assert page not in self.had, "a prefix was forgotten while another page could be had for it"
        else:
            assert page in idle, "a page that nobody has had was taken for more prefixes than are kept"
        self.had.add(page)
        self.held[page] = 1
        self.content.pop(page, None)
        return page

    @rule(target=holds, page=holds)
    def share(self, page: int | None) -> int | None:
        if page is not None:
            self.pool.share(page)
            self.held[page] += 1
        return page

    @rule(page=consumes(holds))
    def drop(self, page: int | None) -> None:
        if page is None:
            return
        self.pool.drop(page)
        self.held[page] -= 1
        if not self.held[page]:
            del self.held[page]

    @rule(page=holds, key=st.integers(0, 9))
    def publish(self, page: int | None, key: int) -> None:
        digest = bytes([key])
        if page is None:
            return
        known = self.pool.find(digest)
        self.pool.publish(page, digest)
        if known is None and page not in self.content:
            self.content[page] = digest
        else:
            assert self.pool.find(digest) == known

    @rule(target=holds, key=st.integers(0, 9))
    def reuse(self, key: int) -> int | None:
        page = self.pool.find(bytes([key]))
        if page is not None:
            assert self.content[page] == bytes([key]), "a prefix was found in a page that holds something else"
            self.pool.share(page)
            self.held[page] = self.held.get(page, 0) + 1
        return page

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.content.clear()
        assert self.pool.cached == 0

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.available == COUNT - len(self.held)
        assert self.pool.touched == len(self.had)
        assert self.pool.idle == len(self.had & self.content.keys() - self.held.keys())
        assert [n for n in self.pool.refs if n] == [self.held[p] for p in sorted(self.held)]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_least_recently_used_goes_first() -> None:
    pool = PagePool(3)
    pages = [pool.take() for _ in range(3)]
    for i, page in enumerate(pages):
        pool.publish(page, bytes([i]))
    for i in (1, 0, 2):
        pool.drop(pages[i])
    pool.share(pages[1])
    pool.drop(pages[1])
    assert [pool.take() for _ in range(3)] == [pages[0], pages[2], pages[1]]
    assert pool.take() is None
    assert pool.cached == 0


@pytest.mark.parametrize(("kept", "most"), [(None, 40), (12, 13), (1, 2), (0, 2)])
def test_memory_is_what_is_held_at_once_and_what_is_kept(kept: int | None, most: int) -> None:
    """However many prefixes come and go, each of two pages."""
    pool = PagePool(40, kept)
    for number in range(100):
        pages = [pool.take(), pool.take()]
        for place, page in enumerate(pages):
            assert page is not None
            pool.publish(page, bytes([number, place]))
        for page in pages:
            pool.drop(page or 0)
    assert pool.touched == most
    newest = [pool.find(bytes([99, place])) for place in (0, 1)]
    assert None not in newest, "the latest is found in any case"


def test_a_page_that_nobody_holds_cannot_be_dropped() -> None:
    pool = PagePool(1)
    with pytest.raises(AssertionError):
        pool.drop(0)


def test_keys_differ_in_everything_that_matters() -> None:
    start = root("model", "salt")
    keys = {
        chain(start, [1, 2], [0]),
        chain(start, [2, 1], [0]),
        chain(start, [1, 2], [3]),
        chain(start, [1, 2], [0, 0]),
        chain(start, [1, 2, 0], [0]),
        chain(start, [1, 2], [0], "0:4:image"),
        chain(root("model", "other"), [1, 2], [0]),
        chain(root("other", "salt"), [1, 2], [0]),
        chain(root("models", "alt"), [1, 2], [0]),
        chain(chain(start, [1, 2], [0]), [1, 2], [0]),
    }
    assert len(keys) == 10
    assert chain(start, [1, 2], [0]) == chain(root("model", "salt"), (1, 2), (0,))


def test_tables_keep_rows_apart() -> None:
    tables = PageTables(2, 4)
    first, second = tables.join([3, 4]), tables.join([9])
    assert {first, second} == {0, 1}
    assert np.array_equal(tables.table[first, :2], [3, 4])
    assert tables.free == 0
    tables.leave(first)
    assert tables.join([]) == first
