"""Images from files and bytes, as the models expect them.

Whatever a file holds (a palette, CMYK, 16 bits, transparency, an orientation note, several frames)
becomes one
upright RGB picture of 8 bits, or one line that says why not. Limits come before decoding: a few
bytes can claim gigapixels.
"""

from __future__ import annotations

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
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
WHITE, BLACK = 255, 0
_EXIF_ORIENTATION = 0x0112
# what that note says has been done to the picture, undone
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
    background: int = WHITE,
) -> Image:
    """One upright RGB picture. source: a path, or the file's bytes. max_pixels: what it may have,
    if not MAX_PIXELS.

    background: the grey that transparent parts show. Raises RequestError for what is none.
    """
    data = source if isinstance(source, bytes) else read_bytes(Path(source))
    if not isinstance(source, bytes):
        name = str(source)
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"{name}: {len(data)} bytes are more than the {MAX_BYTES} allowed; send a smaller file"
        )
    return _decode(
        lambda: PIL.Image.open(io.BytesIO(data), formats=FORMATS), name, max_pixels, background
    )


def _decode(
    opened: Callable[[], Image], name: str, max_pixels: int | None, background: int = WHITE
) -> Image:
    """``to_upright_rgb`` of what ``opened`` gives.

    Raises RequestError for what is too large or cannot be decoded.
    """
    max_pixels = MAX_PIXELS if max_pixels is None else max_pixels
    try:
        with warnings.catch_warnings():
            # PIL warns of large pictures; the limit below is ours
            warnings.simplefilter("ignore")
            picture = opened()
            width, height = picture.size
            if width * height > max_pixels:
                raise RequestError(
                    f"{name}: {width} × {height} pixels are more than {max_pixels}; make it smaller"
                )
            if width * height == 0:
                raise RequestError(f"{name}: {width} × {height} pixels are none")
            return to_upright_rgb(picture, background)
    except (RequestError, MemoryError):
        raise
    except PIL.Image.DecompressionBombError:
        raise RequestError(
            f"{name} claims more than {max_pixels} pixels; make it smaller"
        ) from None
    except Exception as error:  # decoders raise anything for broken files
        formats = ", ".join(FORMATS)
        problem = (
            "cannot be read as an image"
            if isinstance(error, PIL.UnidentifiedImageError)
            else "is a broken image"
        )
        raise RequestError(f"{name} {problem}; known formats: {formats}") from None


def to_upright_rgb(picture: Image, background: int = WHITE) -> Image:
    """RGB of 8 bits, turned as its orientation note says; transparent parts on a grey; of several
    frames the current.

    background: that grey, 0 … 255. Raises what PIL raises for broken pictures.
    """
    picture.load()
    turn = _ORIENTATION_TRANSFORMS.get(_orientation(picture))
    if turn is not None:
        picture = picture.transpose(turn)
    if picture.mode.startswith(("I", "F")):
        return _to_8_bits(picture)
    if picture.mode in ("La", "RGBa"):  # colours that the alpha has been multiplied into
        picture = picture.convert("LA" if picture.mode == "La" else "RGBA")
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        clear = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        ground = PIL.Image.new("RGB", clear.size, (background, background, background))
        ground.paste(clear, mask=clear)
        return ground
    plain = picture.convert("RGB")
    plain.info = {}  # the note has been followed, and is not to be followed again
    return plain


def _orientation(picture: Image) -> Any:
    """EXIF's note on which side is up, if it has one that can be read: a broken note is no broken
    picture.
    """
    try:
        return picture.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # its reader raises anything for broken notes
        return None


def as_image(source: Any, name: str = "the image", max_pixels: int | None = None) -> Image:
    """A picture of ours from whatever a caller holds: path, bytes, PIL image, or array [H, W] or
    [H, W, 3 or 4] uint8.

    name: of bytes and of what has none, in errors. max_pixels: as for ``open_image``. Raises
    RequestError.
    """
    if isinstance(source, (str, Path, bytes)):
        return open_image(source, name, max_pixels)
    if isinstance(source, Image):
        return _decode(lambda: source, name, max_pixels)
    # of torch, which need not be here
    tensor = hasattr(source, "detach") and hasattr(source, "dtype")
    if tensor and str(source.dtype) == "torch.uint8":
        source = source.detach().cpu().numpy()
    if tensor or isinstance(source, np.ndarray):
        shaped = source.ndim == 2 or (source.ndim == 3 and source.shape[2] in (3, 4))
        if source.dtype != np.uint8 or not shaped or 0 in source.shape:
            raise RequestError(
                f"an image array is uint8 of [H, W] or [H, W, 3], not {source.dtype} of "
                f"{list(source.shape)}"
            )
        return _decode(lambda: PIL.Image.fromarray(source), name, max_pixels)
    raise RequestError(
        f"an image is a path, bytes, a PIL image or an array, not {quote(type(source).__name__)}"
    )


def fit_longest_side(size: tuple[int, int], longest_side: int) -> tuple[int, int]:
    """(width, height) of a picture whose longer side becomes ``longest_side``; halves are rounded
    up, nothing vanishes."""
    scale = longest_side / max(size)
    return max(1, int(size[0] * scale + 0.5)), max(1, int(size[1] * scale + 0.5))


def resize_pixels(
    picture: Image, size: tuple[int, int], resample: str = "bilinear"
) -> torch.Tensor:
    """Resized to (width, height) with antialiasing, as PIL does it: [3, height, width] uint8."""
    import torch  # the API's process reads pictures without it

    resampling = (
        PIL.Image.Resampling.BICUBIC if resample == "bicubic" else PIL.Image.Resampling.BILINEAR
    )
    if picture.size != size:
        picture = picture.resize(size, resampling)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def read_bytes(path: Path) -> bytes:
    """A file's bytes, up to MAX_BYTES. Raises RequestError."""
    try:
        with path.open("rb") as file:
            # a device or a pipe tells no size, and may never end
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    except ValueError:  # a NUL, or half a surrogate pair
        raise RequestError(f"{quote(str(path))} is no path; give the name of a file") from None
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"{path}: its bytes are more than the {MAX_BYTES} allowed; give a smaller file"
        )
    return data


def _to_8_bits(picture: Image) -> Image:
    """16 or 32 bits a pixel: scaled by what the format can hold, not by what this picture happens
    to hold.
    """
    values = np.array(picture)
    if picture.mode.startswith("F"):
        values = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)
        values = np.rint(values * np.float32(255 if values.max() <= 1 else 1))
    else:
        # whole numbers: a hundred million pixels would be gigabytes in double precision
        values = (np.clip(values, 0, 65535).astype(np.uint32) + 128) // 257
    grey = np.clip(values, 0, 255).astype(np.uint8)
    return PIL.Image.fromarray(grey).convert("RGB")
