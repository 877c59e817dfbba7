"""Masks for the eye: drawn over the picture, or as pictures of their own; and back, as prompts."""

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

OBJECT_COLOR, BACKGROUND_COLOR, BOX_COLOR = (0, 200, 83), (213, 0, 0), (255, 255, 255)
MASK_PROMPT_LOGIT = 20.0  # the logit of a mask that a person gives: the model's own reach some 30


def overlay(
    picture: Image, masks: Sequence[Mask], prompts: Sequence[Prompt] = (), strength: float = 0.5
) -> Image:
    """The picture with its masks in colours and outlined, small ones on top; and what was asked:
    points and boxes.
    """
    canvas = np.asarray(picture.convert("RGB")).astype(np.float32)
    ordered = sorted(range(len(masks)), key=lambda i: -masks[i].area)
    for i in ordered:
        inside, (x0, y0, x1, y1) = masks[i].box_pixels.numpy(), masks[i].box
        window, colour = (
            canvas[y0 : y1 + 1, x0 : x1 + 1],
            np.array(_color_for_index(i), dtype=np.float32),
        )
        window[inside] = window[inside] * (1 - strength) + colour * strength
        window[_outline(inside, max(1, max(picture.size) // 700))] = colour * 0.6
    drawn = PIL.Image.fromarray(canvas.round().astype(np.uint8))
    for prompt in prompts:
        _draw_prompt(drawn, prompt)
    return drawn


def mask_to_image(mask: Mask) -> Image:
    """One mask as a picture of one bit a pixel, white inside."""
    return PIL.Image.fromarray(mask.pixels.numpy().astype(np.uint8) * 255).convert("1")


def mask_to_png(mask: Mask) -> bytes:
    """One mask as the bytes of a PNG of one bit a pixel, white inside."""
    out = io.BytesIO()
    mask_to_image(mask).save(out, "PNG")
    return out.getvalue()


def mask_prompt_logits(
    drawing: Image, size: tuple[int, int], encoder_size: tuple[int, int], side: int, image: int
) -> torch.Tensor:
    """A mask drawn by a person (white is the object) as a prompt's logits [side, side] float32.

    size, encoder_size: (width, height) of the picture that it belongs to, and inside the encoder's
    square of ``image`` pixels a side; a mask of another size is stretched to it.
    """
    inner = (
        max(1, round(encoder_size[0] * side / image)),
        max(1, round(encoder_size[1] * side / image)),
    )
    small = drawing.convert("L").resize(size).resize(inner, PIL.Image.Resampling.BILINEAR)
    values = torch.from_numpy(np.array(small)).float() / 127.5 - 1
    logits = torch.full((side, side), -MASK_PROMPT_LOGIT)
    logits[: inner[1], : inner[0]] = values * MASK_PROMPT_LOGIT
    return logits


def _color_for_index(index: int) -> tuple[int, int, int]:
    """Hues a golden angle apart, so that neighbours in the list differ."""
    red, green, blue = colorsys.hsv_to_rgb((0.58 + index * 0.61803) % 1, 0.85, 1.0)
    return int(255 * red), int(255 * green), int(255 * blue)


def _outline(inside: np.ndarray, width: int) -> np.ndarray:
    """[H, W] bool: pixels of the mask within ``width`` of its outside."""
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
            outline=BOX_COLOR,
            width=max(1, radius // 3),
        )
