"""Pictures in data URLs and as squares: what is taken, what is refused in a line, and the pixels
against PIL's own.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import RequestError
from modelmill.vision import image_input

NOISE = np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8)


def _png() -> bytes:
    out = io.BytesIO()
    PIL.Image.fromarray(NOISE).save(out, "PNG")
    return out.getvalue()


DATA = _png()


@pytest.mark.parametrize(
    "head", ["data:image/png;base64,", "DATA:IMAGE/PNG;BASE64,",
    "data:image/svg+xml;charset=utf-8;base64,",
             "\ndata:image/png;name=a.png;base64,"]
)  # fmt: skip
def test_the_urls_that_tools_write(head: str) -> None:
    """With parameters, and with the line breaks of the command base64, as /v1/segment takes
    them.
    """
    for body in (base64.b64encode(DATA).decode(), base64.encodebytes(DATA).decode()):
        assert image_input.decode_data_url(head + body, "here") == DATA


@pytest.mark.parametrize("url",
    ["", "data:image/png,abc", "data:text/html;base64,PGI+", "https://example.org/a.png",
                                 "data:image/png;base64,a?b=", "data:image/png;base64,abc"])  # fmt: skip  # noqa: E501
def test_other_urls_are_one_line(url: str) -> None:
    with pytest.raises(RequestError, match=r"^here: ") as caught:
        image_input.decode_data_url(url, "here")
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([14, 56, 224]))
def test_a_square_is_pils_bicubic(width: int, height: int, side: int) -> None:
    """torchvision's Resize of a PIL picture is this very call."""
    pixels = np.random.default_rng(width * 1000 + height).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    actual, _ = image_input.load_image_stretched_to_square(pixels, side)
    expected = PIL.Image.fromarray(pixels).resize((side, side), PIL.Image.Resampling.BICUBIC)
    assert np.array_equal(actual, expected)


def test_more_pixels_than_may_be(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(DATA)
    for source in (tmp_path / "a.png", DATA, NOISE):
        with pytest.raises(RequestError, match="120 × 80 pixels are more than 100"):
            image_input.load_image_stretched_to_square(source, 56, "here", 100)
