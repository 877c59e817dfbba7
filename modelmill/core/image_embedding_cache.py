"""An LRU cache of image embeddings with a limit in bytes, for every model that reads images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class HasNbytes(Protocol):
    """A value that knows its size, such as a tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the embedding in bytes."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=HasNbytes)


class ImageEmbeddingCache(Generic[K, V]):
    """Image embeddings by key; the least recently used is evicted first."""

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache.

        Args:
            max_bytes: limit of all embeddings together; a larger embedding is not cached.
        """
        self.max_bytes, self.nbytes = max_bytes, 0
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """Return the embedding of this key and mark it most recently used; None if absent."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def clear(self) -> None:
        """Remove all entries and set the size to 0."""
        self._entries.clear()
        self.nbytes = 0

    def put(self, key: K, entry: V) -> None:
        """Add an embedding and evict the least recently used ones while over the limit."""
        old = self._entries.pop(key, None)
        self.nbytes += entry.nbytes - (0 if old is None else old.nbytes)
        self._entries[key] = entry
        while self.nbytes > self.max_bytes:
            self.nbytes -= self._entries.popitem(last=False)[1].nbytes
