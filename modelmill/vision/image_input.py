"""Pictures as a language model's eyes take them: resized to a square without cropping, and known by
their pixels.
"""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from modelmill.core.base64_decode import decode_base64
from modelmill.core.errors import RequestError
from modelmill.vision.image import MAX_BYTES, as_image, open_image, read_bytes

_DATA_URL = re.compile(
    r"\s*data:image/[a-z0-9.+-]{1,32}(;[a-z0-9=._+-]{1,64}){0,4}?;base64,", re.IGNORECASE
)
_MAX_URL_HEAD_CHARS = 1024
"""Characters in which an address says what it is."""


def load_square_image(
    source: Any, size: int, location: str = "the image", max_pixels: int | None = None
) -> tuple[np.ndarray, str]:
    """([size, size, 3] uint8, its sha256 with its shape), resized bicubically with antialiasing as
    PIL does it.

    source: a path, bytes, a PIL image or an array, of at most ``max_pixels`` pixels. Aspect is not
    kept, as the original does it. Raises RequestError.
    """
    picture = as_image(source, location, max_pixels)
    if picture.size != (size, size):
        picture = picture.resize((size, size), PIL.Image.Resampling.BICUBIC)
    pixels = np.array(picture)
    return pixels, pixel_digest(pixels)


def to_data_url(path: Path) -> str:
    """A picture's file as a data URL, so that a conversation holds the picture and no path.

    Raises RequestError.
    """
    data = read_bytes(path)
    open_image(data, str(path))  # what is no picture is named now
    mime_type = mimetypes.guess_type(path.name)[0] or ""
    mime_type = mime_type if mime_type.startswith("image/") else "image/png"
    return f"data:{mime_type};base64,{base64.b64encode(data).decode()}"


def pixel_digest(pixels: np.ndarray) -> str:
    """sha256 of shape and pixels: pictures of other shapes with the same bytes differ."""
    head = f"{pixels.dtype}{list(pixels.shape)}:".encode()
    return hashlib.sha256(head + pixels.tobytes()).hexdigest()


def decode_data_url(url: str, location: str) -> bytes:
    """The bytes of a "data:image/…;base64,…" URL; no other is read or fetched.

    Raises RequestError.
    """
    found = _DATA_URL.match(url[:_MAX_URL_HEAD_CHARS])
    if found is None:
        raise RequestError(
            f"{location}: pictures come as data:image/…;base64, addresses are not fetched"
        )
    size = (len(url) - found.end()) * 3 // 4
    if size > MAX_BYTES:
        raise RequestError(f"{location}: {size} bytes are more than the {MAX_BYTES} allowed")
    try:
        # tools break lines; everything else has to be right
        return decode_base64(url, found.end())
    except ValueError:
        raise RequestError(f"{location}: what follows base64, is no base64") from None
