"""Embeddings of pictures seen before, kept within a bound in bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from PIL.Image import Image

DEFAULT_CACHE_BYTES = 32 << 20
"""Eight embeddings [1, 256, 64, 64] in float32."""


@dataclass(frozen=True)
class ImageEmbedding:
    """A picture's embedding [1, 256, G, G], its (width, height) before and inside the encoder's
    square, its digest, and the salt in it."""

    embedding: torch.Tensor = field(repr=False)
    size: tuple[int, int]
    encoder_size: tuple[int, int]
    digest: str = ""
    salt: str = field(default="", repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the embedding."""
        return self.embedding.numel() * self.embedding.element_size()


class EmbeddingCache:
    """By digest; what was used longest ago goes first."""

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        """max_bytes: what all embeddings together may take; one alone may be larger and is then not
        kept.
        """
        self.max_bytes, self.nbytes = max_bytes, 0
        self._entries: OrderedDict[str, ImageEmbedding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def get(self, digest: str) -> ImageEmbedding | None:
        """The picture of that digest, now the one used last."""
        found = self._entries.get(digest)
        if found is not None:
            self._entries.move_to_end(digest)
        return found

    def clear(self) -> None:
        """Let go of all."""
        self._entries.clear()
        self.nbytes = 0

    def put(self, entry: ImageEmbedding) -> None:
        """Keep it, and let go of others while they are too many."""
        old = self._entries.pop(entry.digest, None)
        self.nbytes += entry.nbytes - (0 if old is None else old.nbytes)
        self._entries[entry.digest] = entry
        while self.nbytes > self.max_bytes:
            self.nbytes -= self._entries.popitem(last=False)[1].nbytes


def image_digest(image: Image, salt: str = "") -> str:
    """sha256 of what is seen, its shape included; a salt parts those who are not to share."""
    found = hashlib.sha256(
        f"{len(salt.encode())} {salt} {image.mode} {image.size[0]} {image.size[1]} ".encode()
    )
    found.update(image.tobytes())
    return found.hexdigest()
