"""What is kept of pictures seen before."""

from __future__ import annotations

import PIL.Image
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.core.image_embedding_cache import ImageEmbeddingCache
from modelmill.vision.image import image_digest
from modelmill.vision.image_embedding import ImageEmbedding


def make_embedding(digest: str, numbers: int) -> ImageEmbedding:
    return ImageEmbedding(torch.zeros(numbers), (1, 1), (1, 1), digest)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 40))), st.integers(0, 200))
def test_never_more_bytes_than_allowed_and_the_last_ones_stay(
    steps: list[tuple[str, int]], most: int
) -> None:
    known: ImageEmbeddingCache[str, ImageEmbedding] = ImageEmbeddingCache(most)
    order: list[ImageEmbedding] = []
    for digest, numbers in steps:
        if numbers > 35:
            cached = known.get(digest)
            assert (cached is not None) == (digest in [s.digest for s in order])
            order.sort(key=lambda s: s.digest == digest)
            continue
        known.put(digest, make_embedding(digest, numbers))
        order = [s for s in order if s.digest != digest] + [make_embedding(digest, numbers)]
        while sum(s.nbytes for s in order) > most:
            order.pop(0)
        assert known.nbytes == sum(s.nbytes for s in order) <= most
        assert len(known) == len(order)
        assert all(s.digest in known for s in order)


def test_a_digest_tells_shapes_pixels_and_salts_apart() -> None:
    pictures = [
        PIL.Image.new("RGB", size, colour)
        for size in ((4, 6), (6, 4), (2, 12))
        for colour in (0, 0x010203)
    ]
    digests = {image_digest(p, salt) for p in pictures for salt in ("", "a", "1 a", "RGB 4 6")}
    assert len(digests) == len(pictures) * 4
    assert image_digest(pictures[0].copy(), "a") == image_digest(pictures[0], "a")
