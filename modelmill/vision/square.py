"""Pictures as a language model's eyes take them: resized to a square without cropping, and known by their pixels."""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from modelmill.core.base64_text import decoded
from modelmill.core.errors import RequestError
from modelmill.vision.image import MOST_BYTES, as_image, open_image, read_bytes

_DATA = re.compile(r"\s*data:image/[a-z0-9.+-]{1,32}(;[a-z0-9=._+-]{1,64}){0,4}?;base64,", re.IGNORECASE)
_HEAD = 1024
"""Characters in which an address says what it is."""


def square(given: Any, size: int, where: str = "the image", most: int | None = None) -> tuple[np.ndarray, str]:
    """([size, size, 3] uint8, its sha256 with its shape), resized bicubically with antialiasing as PIL does it.

    given: a path, bytes, a PIL image or an array, of at most ``most`` pixels. Aspect is not kept, as the original does
    it. Raises RequestError.
    """
    picture = as_image(given, where, most)
    if picture.size != (size, size):
        picture = picture.resize((size, size), PIL.Image.Resampling.BICUBIC)
    pixels = np.array(picture)
    return pixels, digest_of(pixels)


def as_url(path: Path) -> str:
    """A picture's file as a data URL, so that a conversation holds the picture and no path. Raises RequestError."""
    data = read_bytes(path)
    open_image(data, str(path))  # what is no picture is named now
    kind = mimetypes.guess_type(path.name)[0] or ""
    kind = kind if kind.startswith("image/") else "image/png"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def digest_of(pixels: np.ndarray) -> str:
    """sha256 of shape and pixels: pictures of other shapes with the same bytes differ."""
    head = f"{pixels.dtype}{list(pixels.shape)}:".encode()
    return hashlib.sha256(head + pixels.tobytes()).hexdigest()


def from_url(url: str, where: str) -> bytes:
    """The bytes of a "data:image/…;base64,…" URL; no other is read or fetched. Raises RequestError."""
    found = _DATA.match(url[:_HEAD])
    if found is None:
        raise RequestError(f"{where}: pictures come as data:image/…;base64, addresses are not fetched")
    size = (len(url) - found.end()) * 3 // 4
    if size > MOST_BYTES:
        raise RequestError(f"{where}: {size} bytes are more than the {MOST_BYTES} allowed")
    try:
        # tools break lines; everything else has to be right
        return decoded(url, found.end())
    except ValueError:
        raise RequestError(f"{where}: what follows base64, is no base64") from None
