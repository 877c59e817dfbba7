"""Decode images from files and bytes to upright 8-bit RGB.

Palettes, CMYK, 16 bits, transparency, EXIF orientation and several frames are converted; anything
else is a RequestError of one line. Limits are checked before decoding, since a few bytes can claim
gigapixels.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
from PIL.Image import Image

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote

if TYPE_CHECKING:
    import torch

MAX_PIXELS = 100_000_000
MAX_BYTES = 64 << 20
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
WHITE_BACKGROUND, BLACK_BACKGROUND = 255, 0
_EXIF_ORIENTATION = 0x0112
# EXIF orientation -> the transform that makes the picture upright
_ORIENTATION_TRANSFORMS = {
    2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
    3: PIL.Image.Transpose.ROTATE_180,
    4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
    5: PIL.Image.Transpose.TRANSPOSE,
    6: PIL.Image.Transpose.ROTATE_270,
    7: PIL.Image.Transpose.TRANSVERSE,
    8: PIL.Image.Transpose.ROTATE_90,
}


def open_image(
    source: Path | str | bytes,
    name: str = "the image",
    max_pixels: int | None = None,
    background: int = WHITE_BACKGROUND,
) -> Image:
    """Open an image as an upright RGB picture.

    Args:
        source: a path, or the file's bytes.
        name: what error messages call it, if ``source`` is bytes.
        max_pixels: limit of width × height; MAX_PIXELS if None.
        background: grey level behind transparent parts, 0 … 255.

    Raises:
        RequestError: if it cannot be read, is too large or is no image of a known format.
    """
    data = source if isinstance(source, bytes) else read_bytes(Path(source))
    if not isinstance(source, bytes):
        name = str(source)
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"{name}: {len(data)} bytes are more than the {MAX_BYTES} allowed; send a smaller file"
        )
    return _decode_to_rgb(
        lambda: PIL.Image.open(io.BytesIO(data), formats=IMAGE_FORMATS),
        name,
        max_pixels,
        background,
    )


def _decode_to_rgb(
    open_picture: Callable[[], Image],
    name: str,
    max_pixels: int | None,
    background: int = WHITE_BACKGROUND,
) -> Image:
    """Apply ``to_upright_rgb`` to the picture that ``open_picture`` returns.

    Raises:
        RequestError: if it is too large or cannot be decoded.
    """
    max_pixels = MAX_PIXELS if max_pixels is None else max_pixels
    try:
        with warnings.catch_warnings():
            # PIL warns about large pictures; max_pixels is checked below
            warnings.simplefilter("ignore")
            picture = open_picture()
            width, height = picture.size
            if width * height > max_pixels:
                raise RequestError(
                    f"{name}: {width} × {height} pixels are more than {max_pixels}; make it smaller"
                )
            if width * height == 0:
                raise RequestError(f"{name}: {width} × {height} pixels: the image is empty")
            return to_upright_rgb(picture, background)
    except (RequestError, MemoryError):
        raise
    except PIL.Image.DecompressionBombError:
        raise RequestError(f"{name} has more than {max_pixels} pixels; make it smaller") from None
    except Exception as error:  # decoders raise anything for broken files
        formats = ", ".join(IMAGE_FORMATS)
        problem = (
            "cannot be read as an image"
            if isinstance(error, PIL.UnidentifiedImageError)
            else "is a broken image"
        )
        raise RequestError(f"{name} {problem}; known formats: {formats}") from None


def to_upright_rgb(picture: Image, background: int = WHITE_BACKGROUND) -> Image:
    """Convert to 8-bit RGB, turned according to its EXIF orientation; the current frame only.

    Args:
        picture: any PIL image.
        background: grey level behind transparent parts, 0 … 255.

    Raises:
        Exception: whatever PIL raises for broken pictures.
    """
    picture.load()
    transform = _ORIENTATION_TRANSFORMS.get(_exif_orientation(picture))
    if transform is not None:
        picture = picture.transpose(transform)
    if picture.mode.startswith(("I", "F")):
        return _to_8_bits(picture)
    if picture.mode in ("La", "RGBa"):  # premultiplied alpha
        picture = picture.convert("LA" if picture.mode == "La" else "RGBA")
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        rgba = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        canvas = PIL.Image.new("RGB", rgba.size, (background, background, background))
        canvas.paste(rgba, mask=rgba)
        return canvas
    rgb = picture.convert("RGB")
    rgb.info = {}  # the orientation is applied; it must not be applied a second time
    return rgb


def _exif_orientation(picture: Image) -> Any:
    """Return the EXIF orientation; None if there is none or the EXIF data is broken."""
    try:
        return picture.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # PIL raises anything for broken EXIF data
        return None


def to_rgb_image(source: Any, name: str = "the image", max_pixels: int | None = None) -> Image:
    """Convert an image source to an upright RGB picture.

    Args:
        source: a path, bytes, a PIL image, or an array or tensor [H, W] or [H, W, 3 or 4] uint8.
        name: what error messages call a source that is no path.
        max_pixels: as for ``open_image``.

    Raises:
        RequestError: if it is no image, or too large.
    """
    if isinstance(source, (str, Path, bytes)):
        return open_image(source, name, max_pixels)
    if isinstance(source, Image):
        return _decode_to_rgb(lambda: source, name, max_pixels)
    # a torch tensor; torch need not be installed
    tensor = hasattr(source, "detach") and hasattr(source, "dtype")
    if tensor and str(source.dtype) == "torch.uint8":
        source = source.detach().cpu().numpy()
    if tensor or isinstance(source, np.ndarray):
        shaped = source.ndim == 2 or (source.ndim == 3 and source.shape[2] in (3, 4))
        if source.dtype != np.uint8 or not shaped or 0 in source.shape:
            raise RequestError(
                f"an image array must be uint8 [H, W], [H, W, 3] or [H, W, 4], not {source.dtype} "
                f"{list(source.shape)}"
            )
        return _decode_to_rgb(lambda: PIL.Image.fromarray(source), name, max_pixels)
    raise RequestError(
        f"an image must be a path, bytes, a PIL image or an array, not "
        f"{quote(type(source).__name__)}"
    )


def fit_longest_side(size: tuple[int, int], longest_side: int) -> tuple[int, int]:
    """Return (width, height) scaled so that the longer side is ``longest_side``.

    Halves are rounded up; a side is at least 1.
    """
    scale = longest_side / max(size)
    return max(1, int(size[0] * scale + 0.5)), max(1, int(size[1] * scale + 0.5))


def resize_to_tensor(picture: Image, size: tuple[int, int]) -> torch.Tensor:
    """Resize to (width, height), bilinear and antialiased as PIL: [3, height, width] uint8."""
    import torch  # the API process reads pictures without torch

    if picture.size != size:
        picture = picture.resize(size, PIL.Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def read_bytes(path: Path) -> bytes:
    """Read a file of at most MAX_BYTES; raise RequestError if it cannot be read or is larger."""
    try:
        with path.open("rb") as file:
            # bounded: a device or a pipe has no size and may never end
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise RequestError(f"{path}: there is no such file; give the path of a picture") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL, or a lone surrogate
        raise RequestError(f"{quote(str(path))} is no path; give the path of a file") from None
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"{path}: its bytes are more than the {MAX_BYTES} allowed; use a smaller file"
        )
    return data


def _to_8_bits(picture: Image) -> Image:
    """Convert 16 or 32 bits per pixel, scaled by the format's range, not by this picture's."""
    values = np.array(picture)
    if picture.mode.startswith("F"):
        values = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)
        values = np.rint(values * np.float32(255 if values.max() <= 1 else 1))
    else:
        # integer arithmetic: in float64 a hundred million pixels would take gigabytes
        values = (np.clip(values, 0, 65535).astype(np.uint32) + 128) // 257
    grey = np.clip(values, 0, 255).astype(np.uint8)
    return PIL.Image.fromarray(grey).convert("RGB")


def image_digest(image: Image, salt: str = "") -> str:
    """Return the SHA-256 of the pixels, mode and size; different salts give different digests."""
    digest = hashlib.sha256(
        f"{len(salt.encode())} {salt} {image.mode} {image.size[0]} {image.size[1]} ".encode()
    )
    digest.update(image.tobytes())
    return digest.hexdigest()
