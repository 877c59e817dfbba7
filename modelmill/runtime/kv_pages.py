"""The pool of KV pages: free list, reference counts and the prefix cache.

A page is free, held by one or more sequences, or idle: unreferenced but still holding the keys and
values of a known prefix. Idle pages are found again by their sha256 chain key and are evicted,
least recently used first, when no page
is free. Pages are only shared when full, or between forks; a fork that writes into a shared page
gets its own copy.

In RAM a page takes memory from when it is first written. So pages that were given back are taken
again before any that nobody has had, and once ``max_idle`` pages are idle, they are evicted before
a new one is taken: a server takes what its answers hold at once and the prefixes that it may keep,
however many tokens go through it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np


def root_key(model: str, cache_salt: str) -> bytes:
    """The parent key of first pages: which model, and whose cache."""
    return hashlib.sha256(f"{len(model)}:{model}:{cache_salt}".encode()).digest()


def page_key(
    parent: bytes, tokens: Iterable[int], rope_keys: Iterable[int], embedding_key: str = ""
) -> bytes:
    """The key of a full page: its parent's key, its token ids, their rope keys, and foreign content
    in it.
    """
    state = hashlib.sha256(parent)
    state.update(array("q", tokens).tobytes())
    rope = array("q", rope_keys)
    state.update(b"%d;" % len(rope))
    state.update(rope.tobytes())
    state.update(embedding_key.encode())
    return state.digest()


class PagePool:
    """Who holds which of ``count`` pages."""

    def __init__(self, count: int, max_idle: int | None = None) -> None:
        """max_idle: idle pages for which pages that nobody has had are taken; None: all."""
        self.count = count
        self.max_idle = count if max_idle is None else min(max_idle, count)
        self.num_touched = 0
        self.refs = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_by_key: dict[bytes, int] = {}
        self._key_by_page: list[bytes | None] = [None] * count

    @property
    def num_available(self) -> int:
        """Pages that could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages that nobody holds, kept for who begins alike."""
        return len(self._idle)

    @property
    def num_cached(self) -> int:
        """Pages whose content can be found by key."""
        return len(self._page_by_key)

    def alloc(self) -> int | None:
        """A page for one holder; None where all are held.

        Evicts the least recently used idle page if it must.
        """
        new = self.count - self.num_touched
        # those that nobody has had lie below the others
        if len(self._free) > new or (new and not (self._idle and len(self._idle) >= self.max_idle)):
            self.num_touched += len(self._free) == new
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._evict(page)
        else:
            return None
        self.refs[page] = 1
        return page

    def incref(self, page: int) -> None:
        """One more holder of a page that is held or idle."""
        if self.refs[page] == 0:
            del self._idle[page]
        self.refs[page] += 1

    def decref(self, page: int) -> None:
        """One holder less; the last one leaves it idle if its key is known, else free."""
        assert self.refs[page] > 0, f"page {page} is not held"
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if self._key_by_page[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def lookup(self, key: bytes) -> int | None:
        """The page that holds this prefix; not yet held for the caller."""
        return self._page_by_key.get(key)

    def cache(self, page: int, key: bytes) -> None:
        """Make a full, computed page findable; the first page with a key keeps it."""
        if self._key_by_page[page] is None and key not in self._page_by_key:
            self._page_by_key[key] = page
            self._key_by_page[page] = key

    def clear(self) -> None:
        """Forget every cached prefix; held pages stay held."""
        for page in list(self._page_by_key.values()):
            self._evict(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def _evict(self, page: int) -> None:
        digest = self._key_by_page[page]
        if digest is not None:
            del self._page_by_key[digest]
            self._key_by_page[page] = None


class PageTables:
    """Page numbers of the running sequences: ``table`` is [rows, pages] int32, kept as pages come
    and go.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.table = np.zeros((rows, width), dtype=np.int32)
        self._rows = list(range(rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Rows nobody uses."""
        return len(self._rows)

    def alloc_row(self, pages: list[int]) -> int:
        """A row that starts with ``pages``."""
        row = self._rows.pop()
        self.table[row, : len(pages)] = pages
        return row

    def free_row(self, row: int) -> None:
        """Give a row back."""
        self._rows.append(row)
