"""The pool of KV pages: free list, reference counts and the prefix cache.

A page is free, held by one or more sequences, or idle: unreferenced but still holding the keys and values of a known
prefix. Idle pages are found again by their sha256 chain key and are evicted, least recently used first, when no page
is free. Pages are only shared when full, or between forks; a fork that writes into a shared page gets its own copy.

In RAM a page takes memory from when it is first written. So pages that were given back are taken again before any that
nobody has had, and once ``kept`` pages are idle, they are evicted before a new one is taken: a server takes what its
answers hold at once and the prefixes that it may keep, however many tokens go through it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np


def root(model: str, salt: str) -> bytes:
    """The parent key of first pages: which model, and whose cache."""
    return hashlib.sha256(f"{len(model)}:{model}:{salt}".encode()).digest()


def chain(parent: bytes, tokens: Iterable[int], keys: Iterable[int], extra: str = "") -> bytes:
    """The key of a full page: its parent's key, its token ids, their rope keys, and foreign content in it."""
    state = hashlib.sha256(parent)
    state.update(array("q", tokens).tobytes())
    rope = array("q", keys)
    state.update(b"%d;" % len(rope))
    state.update(rope.tobytes())
    state.update(extra.encode())
    return state.digest()


class PagePool:
    """Who holds which of ``count`` pages."""

    def __init__(self, count: int, kept: int | None = None) -> None:
        """kept: idle pages for which pages that nobody has had are taken; None: all."""
        self.count = count
        self.kept = count if kept is None else min(kept, count)
        self.touched = 0
        self.refs = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._known: dict[bytes, int] = {}
        self._digest: list[bytes | None] = [None] * count

    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that nobody holds, kept for who begins alike."""
        return len(self._idle)

    @property
    def cached(self) -> int:
        """Pages whose content can be found by key."""
        return len(self._known)

    def take(self) -> int | None:
        """A page for one holder; None where all are held. Evicts the least recently used idle page if it must."""
        new = self.count - self.touched
        # those that nobody has had lie below the others
        if len(self._free) > new or (new and not (self._idle and len(self._idle) >= self.kept)):
            self.touched += len(self._free) == new
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            return None
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held or idle."""
        if self.refs[page] == 0:
            del self._idle[page]
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; the last one leaves it idle if its key is known, else free."""
        assert self.refs[page] > 0, f"page {page} is not held"
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if self._digest[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def find(self, digest: bytes) -> int | None:
        """The page that holds this prefix; not yet held for the caller."""
        return self._known.get(digest)

    def publish(self, page: int, digest: bytes) -> None:
        """Make a full, computed page findable; the first page with a key keeps it."""
        if self._digest[page] is None and digest not in self._known:
            self._known[digest] = page
            self._digest[page] = digest

    def clear(self) -> None:
        """Forget every cached prefix; held pages stay held."""
        for page in list(self._known.values()):
            self._forget(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, page: int) -> None:
        digest = self._digest[page]
        if digest is not None:
            del self._known[digest]
            self._digest[page] = None


class PageTables:
    """Page numbers of the running sequences: ``table`` is [rows, pages] int32, kept as pages come and go."""

    def __init__(self, rows: int, width: int) -> None:
        self.table = np.zeros((rows, width), dtype=np.int32)
        self._rows = list(range(rows - 1, -1, -1))

    @property
    def free(self) -> int:
        """Rows nobody uses."""
        return len(self._rows)

    def join(self, pages: list[int]) -> int:
        """A row that starts with ``pages``."""
        row = self._rows.pop()
        self.table[row, : len(pages)] = pages
        return row

    def leave(self, row: int) -> None:
        """Give a row back."""
        self._rows.append(row)
