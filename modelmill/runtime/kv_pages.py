"""The pool of KV pages: free list, reference counts and the prefix cache.

A page is free, referenced by one or more sequences, or idle: unreferenced, but with the keys and
values of a cached prefix. Idle pages are found again by their sha256 chain key and are evicted,
least recently used first, when no page is free. Pages are only shared when full, or between forks;
a fork that writes into a shared page gets its own copy. In layers that have a window, a sequence
frees the pages behind it, and a cached prefix needs those inside it only.

Where some layers have a window and others not, a page is of one page group
(``core.page_groups``): each group of a sequence has its own pages, all of one pool, and a page
table of its own. The prefix cache keeps the pages of each group under a key of that group.

In RAM a page takes memory from its first write on. So released pages are reused before untouched
ones, and once ``max_idle`` pages are idle, these are evicted before an untouched page is taken: the
memory of a server follows its concurrent sequences and its prefix cache, not its throughput.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from modelmill.core.kv_page_counts import first_page_in_use

NO_PAGE = -1
"""In a sequence's pages, in the place of one that was freed behind the window."""


def root_page_key(model: str, cache_salt: str) -> bytes:
    """The parent key of first pages: identifies the model and the request's cache salt."""
    return hashlib.sha256(f"{len(model)}:{model}:{cache_salt}".encode()).digest()


def page_key(
    parent: bytes, tokens: Iterable[int], rope_frequency_ids: Iterable[int], embedding_key: str = ""
) -> bytes:
    """A full page's key: hash of its parent's, token ids, rope frequency ids and embeddings."""
    state = hashlib.sha256(parent)
    state.update(array("q", tokens).tobytes())
    rope = array("q", rope_frequency_ids)
    state.update(b"%d;" % len(rope))
    state.update(rope.tobytes())
    state.update(embedding_key.encode())
    return state.digest()


def page_group_key(key: bytes, group: int) -> bytes:
    """The key of a page group's page, from the page's key; that of the first group is the same."""
    return key + bytes((group,)) if group else key


class PagePool:
    """Reference counts, free list and prefix cache of ``count`` pages."""

    def __init__(self, count: int, max_idle: int | None = None, groups: int = 1) -> None:
        """Start with all pages free and untouched.

        Args:
            count: Number of pages.
            max_idle: From so many idle pages on, one is evicted before an untouched page is taken;
                None: never.
            groups: Page groups that take pages.
        """
        self.count = count
        self.max_idle = count if max_idle is None else min(max_idle, count)
        self.num_touched = 0
        self.refs = [0] * count
        self._num_in_use = [0] * groups
        self._group_by_page = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_by_key: dict[bytes, int] = {}
        self._key_by_page: list[bytes | None] = [None] * count

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free or idle."""
        return len(self._free) + len(self._idle)

    @property
    def num_evictable(self) -> int:
        """Unreferenced pages that are kept for their prefix."""
        return len(self._idle)

    @property
    def num_cached(self) -> int:
        """Pages in the prefix cache."""
        return len(self._page_by_key)

    def num_in_use_by_group(self) -> list[int]:
        """Referenced pages of each page group."""
        return list(self._num_in_use)

    def alloc_page(self, group: int = 0) -> int | None:
        """Allocate a page with one reference; None if all pages are referenced.

        Evicts the least recently used idle page if none is free.

        Args:
            group: The page group that takes it.
        """
        untouched = self.count - self.num_touched
        # the free list is a stack with the untouched pages at its bottom
        if len(self._free) > untouched or (
            untouched and not (self._idle and len(self._idle) >= self.max_idle)
        ):
            self.num_touched += len(self._free) == untouched
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._drop_cache_key(page)
        else:
            return None
        self.refs[page] = 1
        self._group_by_page[page] = group
        self._num_in_use[group] += 1
        return page

    def incref(self, page: int) -> None:
        """Add a reference to a page that is referenced or idle."""
        if self.refs[page] == 0:
            del self._idle[page]
            self._num_in_use[self._group_by_page[page]] += 1
        self.refs[page] += 1

    def decref(self, page: int) -> None:
        """Drop a reference; without any, a page with a key becomes idle, another free."""
        assert self.refs[page] > 0, f"page {page} is not referenced"
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self._num_in_use[self._group_by_page[page]] -= 1
            if self._key_by_page[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def cached_page_for_key(self, key: bytes) -> int | None:
        """The page with this prefix key, or None; takes no reference."""
        return self._page_by_key.get(key)

    def add_to_prefix_cache(self, page: int, key: bytes) -> None:
        """Add a full, computed page to the prefix cache; the first page with a key keeps it."""
        if self._key_by_page[page] is None and key not in self._page_by_key:
            self._page_by_key[key] = page
            self._key_by_page[page] = key

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache; referenced pages stay referenced."""
        for page in list(self._page_by_key.values()):
            self._drop_cache_key(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def _drop_cache_key(self, page: int) -> None:
        digest = self._key_by_page[page]
        if digest is not None:
            del self._page_by_key[digest]
            self._key_by_page[page] = None


def num_resumable_pages(
    pool: PagePool, keys: Seq[bytes], page_size: int, windows: Seq[int | None]
) -> int:
    """Pages of the longest prefix that a sequence can continue from.

    Behind it a query reads all pages of a group with full attention, and those inside the window of
    another; all of these are cached.

    Args:
        pool: The pages.
        keys: Of the prefix's pages, as of ``page_key``.
        page_size: Tokens of a page.
        windows: Of each page group; None: full attention.
    """
    best = 0
    first_cached = [0] * len(windows)  # of each group: from it on all pages are cached
    for count, key in enumerate(keys, 1):
        complete = True
        for group, window in enumerate(windows):
            if pool.cached_page_for_key(page_group_key(key, group)) is None:
                if window is None:
                    return best
                first_cached[group] = count
            if first_cached[group] > first_page_in_use(count * page_size, page_size, window):
                complete = False
        if complete:
            best = count
    return best


class PageTables:
    """Page tables of the running sequences.

    Attributes:
        tables: Of each page group [rows, pages] int32: numbers of pages, times the group's step.
        table: Of the first group.
    """

    def __init__(self, rows: int, width: int, steps: Seq[int] = (1,)) -> None:
        """Make them.

        Args:
            rows: Most running sequences.
            width: Pages of the longest.
            steps: Of each page group, how far apart the numbers of two pages are in its tables
                (``ModelKVCacheSpec.page_id_strides``).
        """
        self._steps = tuple(steps)
        self.tables = tuple(np.zeros((rows, width), dtype=np.int32) for _ in self._steps)
        self.table = self.tables[0]
        self._rows = list(range(rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Number of unused rows of the table."""
        return len(self._rows)

    def alloc_row_with_pages(self, *group_pages: list[int]) -> int:
        """Take a row and write the pages of each group into it."""
        row = self._rows.pop()
        for group, pages in enumerate(group_pages):
            self.tables[group][row, : len(pages)] = pages
            self.tables[group][row, : len(pages)] *= self._steps[group]
            self.alias_freed_entries(row, pages, pages.count(NO_PAGE), group)
        return row

    def set_page(self, row: int, index: int, page: int, group: int = 0) -> None:
        """Write one page of a sequence."""
        self.tables[group][row, index] = page * self._steps[group]

    def alias_freed_entries(self, row: int, pages: list[int], freed: int, group: int = 0) -> None:
        """Name a page of the sequence in the places of those that were freed, which are not read.

        An implementation may read them all the same, with a weight of 0 for each of their tokens.
        """
        if freed:
            self.tables[group][row, :freed] = pages[freed] * self._steps[group]

    def return_row_to_free_list(self, row: int) -> None:
        """Return a row of the table to the free list."""
        self._rows.append(row)
