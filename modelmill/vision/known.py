"""Embeddings of pictures seen before, kept within a bound in bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from PIL.Image import Image

KEPT_BYTES = 32 << 20
"""Eight embeddings [1, 256, 64, 64] in float32."""


@dataclass(frozen=True)
class Seen:
    """A picture's embedding [1, 256, G, G], its (width, height) before and inside the encoder's square, its digest, and
    the salt in it."""

    embedding: torch.Tensor = field(repr=False)
    size: tuple[int, int]
    fitted: tuple[int, int]
    digest: str = ""
    salt: str = field(default="", repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the embedding."""
        return self.embedding.numel() * self.embedding.element_size()


class Known:
    """By digest; what was used longest ago goes first."""

    def __init__(self, most: int = KEPT_BYTES) -> None:
        """most: bytes that all embeddings together may take; one alone may be larger and is then not kept."""
        self.most, self.nbytes = most, 0
        self._seen: OrderedDict[str, Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, digest: str) -> bool:
        return digest in self._seen

    def get(self, digest: str) -> Seen | None:
        """The picture of that digest, now the one used last."""
        found = self._seen.get(digest)
        if found is not None:
            self._seen.move_to_end(digest)
        return found

    def clear(self) -> None:
        """Let go of all."""
        self._seen.clear()
        self.nbytes = 0

    def keep(self, seen: Seen) -> None:
        """Keep it, and let go of others while they are too many."""
        old = self._seen.pop(seen.digest, None)
        self.nbytes += seen.nbytes - (0 if old is None else old.nbytes)
        self._seen[seen.digest] = seen
        while self.nbytes > self.most:
            self.nbytes -= self._seen.popitem(last=False)[1].nbytes


def digest_of(picture: Image, salt: str = "") -> str:
    """sha256 of what is seen, its shape included; a salt parts those who are not to share."""
    found = hashlib.sha256(f"{len(salt.encode())} {salt} {picture.mode} {picture.size[0]} {picture.size[1]} ".encode())
    found.update(picture.tobytes())
    return found.hexdigest()
