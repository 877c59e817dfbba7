"""Image input of a vision-language model: square resize without cropping, digest, data URLs."""

from __future__ import annotations

import base64
import mimetypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from modelmill.core.errors import RequestError
from modelmill.core.gil_yielding_base64 import decode_base64
from modelmill.vision.image import MAX_BYTES, image_digest, open_image, read_bytes, to_rgb_image

_DATA_URL = re.compile(
    r"\s*data:image/[a-z0-9.+-]{1,32}(;[a-z0-9=._+-]{1,64}){0,4}?;base64,", re.IGNORECASE
)
_MAX_URL_HEAD_CHARS = 1024
"""Characters of a URL in which its media type must end."""


def load_image_stretched_to_square(
    source: Any, size: int, location: str = "the image", max_pixels: int | None = None
) -> tuple[np.ndarray, str]:
    """Load an image and resize it to a square with PIL's bicubic filter and antialiasing.

    The aspect ratio is not kept, as in the original model's preprocessing.

    Args:
        source: a path, bytes, a PIL image or an array.
        size: side of the square.
        location: what error messages call a source that is no path.
        max_pixels: limit of the source's pixels; see ``open_image``.

    Returns:
        Pixels [size, size, 3] uint8, and their ``image_digest``.

    Raises:
        RequestError: if it is no image, or too large.
    """
    picture = to_rgb_image(source, location, max_pixels)
    if picture.size != (size, size):
        picture = picture.resize((size, size), PIL.Image.Resampling.BICUBIC)
    return np.array(picture), image_digest(picture)


def image_file_to_data_url(path: Path) -> str:
    """Encode an image file as a data URL.

    Raises:
        RequestError: if the file cannot be read or is no image.
    """
    data = read_bytes(path)
    open_image(data, str(path))  # report a file that is no image now
    mime_type = mimetypes.guess_type(path.name)[0] or ""
    mime_type = mime_type if mime_type.startswith("image/") else "image/png"
    return f"data:{mime_type};base64,{base64.b64encode(data).decode()}"


def decode_data_url(url: str, location: str) -> bytes:
    """Decode a "data:image/…;base64,…" URL to bytes; other URLs are never fetched.

    Raises:
        RequestError: if it is another URL, too large, or no valid base64.
    """
    match = _DATA_URL.match(url[:_MAX_URL_HEAD_CHARS])
    if match is None:
        raise RequestError(
            f"{location}: send pictures as data:image/…;base64 URLs; addresses are not fetched"
        )
    size = (len(url) - match.end()) * 3 // 4
    if size > MAX_BYTES:
        raise RequestError(f"{location}: {size} bytes are more than the {MAX_BYTES} allowed")
    try:
        # line breaks are allowed; everything else must be valid
        return decode_base64(url, match.end())
    except ValueError:
        raise RequestError(f"{location}: the data after base64, is no valid base64") from None
