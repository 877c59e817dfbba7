"""Draw masks over a picture, convert masks to images, and drawn masks to prompt logits."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence

import numpy as np
import PIL.Image
import torch
from PIL import ImageDraw
from PIL.Image import Image

from modelmill.vision.prompts import Prompt
from modelmill.vision.sam_model import Mask

OBJECT_COLOR, BACKGROUND_COLOR, POINT_OUTLINE_COLOR = (0, 200, 83), (213, 0, 0), (255, 255, 255)
MASK_OPACITY = 0.5
MASK_PROMPT_LOGIT = 20.0  # logit of a hand-drawn mask; the model's own logits reach about 30


def overlay_masks(picture: Image, masks: Sequence[Mask], prompts: Sequence[Prompt] = ()) -> Image:
    """Draw coloured, outlined masks over the picture, smaller ones on top, and the prompts.

    Args:
        picture: the segmented picture.
        masks: its masks.
        prompts: points and boxes to draw on top.

    Returns:
        A new RGB picture.
    """
    canvas = np.asarray(picture.convert("RGB")).astype(np.float32)
    ordered = sorted(range(len(masks)), key=lambda i: -masks[i].area)
    for i in ordered:
        inside, (x0, y0, x1, y1) = masks[i].box_pixels.numpy(), masks[i].box
        window, colour = (
            canvas[y0 : y1 + 1, x0 : x1 + 1],
            np.array(_color_for_index(i), dtype=np.float32),
        )
        window[inside] = window[inside] * (1 - MASK_OPACITY) + colour * MASK_OPACITY
        window[_mask_outline(inside, max(1, max(picture.size) // 700))] = colour * 0.6
    drawn = PIL.Image.fromarray(canvas.round().astype(np.uint8))
    for prompt in prompts:
        _draw_prompt(drawn, prompt)
    return drawn


def mask_to_image(mask: Mask) -> Image:
    """Convert a mask to a 1-bit image, white inside."""
    return PIL.Image.fromarray(mask.pixels.numpy().astype(np.uint8) * 255).convert("1")


def mask_to_png(mask: Mask) -> bytes:
    """Convert a mask to the bytes of a 1-bit PNG, white inside."""
    out = io.BytesIO()
    mask_to_image(mask).save(out, "PNG")
    return out.getvalue()


def mask_prompt_logits(
    drawing: Image, size: tuple[int, int], encoder_size: tuple[int, int], side: int, image: int
) -> torch.Tensor:
    """Convert a hand-drawn mask (white is the object) to prompt logits [side, side] float32.

    Args:
        drawing: the mask; a mask of another size is stretched to ``size``.
        size: (width, height) of the picture that it belongs to.
        encoder_size: (width, height) of the picture inside the encoder's square input.
        side: side of the logits.
        image: side of the encoder's square input in pixels.
    """
    scaled_size = (
        max(1, round(encoder_size[0] * side / image)),
        max(1, round(encoder_size[1] * side / image)),
    )
    scaled = drawing.convert("L").resize(size).resize(scaled_size, PIL.Image.Resampling.BILINEAR)
    values = torch.from_numpy(np.array(scaled)).float() / 127.5 - 1
    logits = torch.full((side, side), -MASK_PROMPT_LOGIT)
    logits[: scaled_size[1], : scaled_size[0]] = values * MASK_PROMPT_LOGIT
    return logits


def _color_for_index(index: int) -> tuple[int, int, int]:
    """Return a colour; hues are a golden angle apart, so that neighbours differ."""
    red, green, blue = colorsys.hsv_to_rgb((0.58 + index * 0.61803) % 1, 0.85, 1.0)
    return int(255 * red), int(255 * green), int(255 * blue)


def _mask_outline(inside: np.ndarray, width: int) -> np.ndarray:
    """Return [H, W] bool: pixels of the mask within ``width`` pixels of its border."""
    core = inside
    for _ in range(width):
        padded = np.pad(core, 1)
        core = core & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return inside & ~core


def _draw_prompt(picture: Image, prompt: Prompt) -> None:
    pen = ImageDraw.Draw(picture)
    radius = max(3, max(picture.size) // 150)
    if prompt.box is not None:
        pen.rectangle(prompt.box, outline=OBJECT_COLOR, width=max(1, radius // 3))
    for (x, y), label in zip(prompt.points, prompt.labels, strict=True):
        edges = (x - radius, y - radius, x + radius, y + radius)
        pen.ellipse(
            edges,
            fill=OBJECT_COLOR if label else BACKGROUND_COLOR,
            outline=POINT_OUTLINE_COLOR,
            width=max(1, radius // 3),
        )
