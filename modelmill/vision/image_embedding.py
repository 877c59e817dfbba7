"""The vision encoder's output for one picture."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

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
