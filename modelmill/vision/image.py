"""Images from files and bytes, as the models expect them.

Whatever a file holds (a palette, CMYK, 16 bits, transparency, an orientation note, several frames) becomes one
upright RGB picture of 8 bits, or one line that says why not. Limits come before decoding: a few bytes can claim
gigapixels.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
from PIL import ImageOps
from PIL.Image import Image

from modelmill.core.errors import RequestError
from modelmill.core.quote import quoted

if TYPE_CHECKING:
    import torch

MOST_PIXELS = 100_000_000
MOST_BYTES = 64 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


def open_image(source: Path | str | bytes, name: str = "the image", most: int | None = None) -> Image:
    """One upright RGB picture. source: a path, or the file's bytes. most: pixels that it may have, if not MOST_PIXELS.

    Raises RequestError for what is none.
    """
    data = source if isinstance(source, bytes) else read_bytes(Path(source))
    most = MOST_PIXELS if most is None else most
    if not isinstance(source, bytes):
        name = str(source)
    if len(data) > MOST_BYTES:
        raise RequestError(f"{name}: {len(data)} bytes are more than the {MOST_BYTES} allowed; send a smaller file")
    try:
        with warnings.catch_warnings():
            # PIL warns of large pictures; the limit below is ours
            warnings.simplefilter("ignore")
            picture = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = picture.size
            if width * height > most:
                raise RequestError(f"{name}: {width} × {height} pixels are more than {most}; make it smaller")
            return upright(picture)
    except RequestError:
        raise
    except PIL.Image.DecompressionBombError:
        raise RequestError(f"{name} claims more than {most} pixels; make it smaller") from None
    except Exception as error:  # decoders raise anything for broken files
        kinds = ", ".join(FORMATS)
        kind = "cannot be read as an image" if isinstance(error, PIL.UnidentifiedImageError) else "is a broken image"
        raise RequestError(f"{name} {kind}; known formats: {kinds}") from None


def upright(picture: Image) -> Image:
    """RGB of 8 bits, turned as its orientation note says; transparent parts on white; the first of several frames."""
    picture.seek(0)
    picture.load()
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith(("I", "F")):
        return _from_deep(picture)
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        clear = picture.convert("RGBA")
        ground = PIL.Image.new("RGBA", clear.size, (255, 255, 255, 255))
        return PIL.Image.alpha_composite(ground, clear).convert("RGB")
    return picture.convert("RGB")


def as_image(given: Any) -> Image:
    """A picture of ours from whatever a caller holds: path, bytes, PIL image, or array [H, W] or [H, W, 3 or 4] uint8.

    Raises RequestError.
    """
    if isinstance(given, (str, Path, bytes)):
        return open_image(given)
    if isinstance(given, Image):
        return upright(given)
    if hasattr(given, "detach"):  # a tensor of torch, which need not be here
        given = given.detach().cpu().numpy()
    if isinstance(given, np.ndarray):
        shaped = given.ndim == 2 or (given.ndim == 3 and given.shape[2] in (3, 4))
        if given.dtype != np.uint8 or not shaped or 0 in given.shape:
            raise RequestError(
                f"an image array is uint8 of [H, W] or [H, W, 3], not {given.dtype} of {list(given.shape)}"
            )
        return upright(PIL.Image.fromarray(given))
    raise RequestError(f"an image is a path, bytes, a PIL image or an array, not {quoted(type(given).__name__)}")


def fitted(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """(width, height) of a picture whose longer side becomes ``longest``; halves are rounded up, nothing vanishes."""
    scale = longest / max(size)
    return max(1, int(size[0] * scale + 0.5)), max(1, int(size[1] * scale + 0.5))


def pixels(picture: Image, size: tuple[int, int], how: str = "bilinear") -> torch.Tensor:
    """Resized to (width, height) with antialiasing, as PIL does it: [3, height, width] uint8."""
    import torch  # the API's process reads pictures without it

    resampling = PIL.Image.Resampling.BICUBIC if how == "bicubic" else PIL.Image.Resampling.BILINEAR
    if picture.size != size:
        picture = picture.resize(size, resampling)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def read_bytes(path: Path) -> bytes:
    """A file's bytes, up to MOST_BYTES. Raises RequestError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise RequestError(f"{path}: {path.stat().st_size} bytes are more than the {MOST_BYTES} allowed")
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None


def _from_deep(picture: Image) -> Image:
    """16 or 32 bits a pixel: scaled by what the format can hold, not by what this picture happens to hold."""
    values = np.asarray(picture).astype(np.float64)
    if picture.mode.startswith("F"):
        values = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)
        values = values * (255 if values.max() <= 1 else 1)
    else:
        values = values / 257
    grey = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return PIL.Image.fromarray(grey).convert("RGB")
