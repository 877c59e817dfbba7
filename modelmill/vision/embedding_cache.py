"""An LRU cache of image embeddings with a limit in bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from PIL.Image import Image

DEFAULT_CACHE_BYTES = 32 << 20
"""Size of eight embeddings [1, 256, 64, 64] in float32."""


@dataclass(frozen=True)
class ImageEmbedding:
    """The vision encoder's output for one picture.

    Attributes:
        embedding: [1, 256, G, G].
        size: (width, height) of the picture.
        encoder_size: (width, height) of the picture inside the encoder's square input.
        digest: ``image_digest`` of the picture and the salt.
        salt: separates cache entries of clients that must not share them.
    """

    embedding: torch.Tensor = field(repr=False)
    size: tuple[int, int]
    encoder_size: tuple[int, int]
    digest: str = ""
    salt: str = field(default="", repr=False)

    @property
    def nbytes(self) -> int:
        """Size of the embedding in bytes."""
        return self.embedding.numel() * self.embedding.element_size()


class EmbeddingCache:
    """Image embeddings by digest; the least recently used is evicted first."""

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        """Create an empty cache.

        Args:
            max_bytes: limit of all embeddings together; a larger embedding is not cached.
        """
        self.max_bytes, self.nbytes = max_bytes, 0
        self._entries: OrderedDict[str, ImageEmbedding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def get(self, digest: str) -> ImageEmbedding | None:
        """Return the embedding with this digest and mark it most recently used; None if absent."""
        entry = self._entries.get(digest)
        if entry is not None:
            self._entries.move_to_end(digest)
        return entry

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.nbytes = 0

    def put(self, entry: ImageEmbedding) -> None:
        """Add an embedding and evict the least recently used ones while over the limit."""
        old = self._entries.pop(entry.digest, None)
        self.nbytes += entry.nbytes - (0 if old is None else old.nbytes)
        self._entries[entry.digest] = entry
        while self.nbytes > self.max_bytes:
            self.nbytes -= self._entries.popitem(last=False)[1].nbytes


def image_digest(image: Image, salt: str = "") -> str:
    """Return the SHA-256 of the pixels, mode and size; different salts give different digests."""
    digest = hashlib.sha256(
        f"{len(salt.encode())} {salt} {image.mode} {image.size[0]} {image.size[1]} ".encode()
    )
    digest.update(image.tobytes())
    return digest.hexdigest()
