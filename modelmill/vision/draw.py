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
from modelmill.vision.segment import Mask

OBJECT, GROUND, FRAME = (0, 200, 83), (213, 0, 0), (255, 255, 255)
SURE = 20.0  # the logit of a mask that a person gives: the model's own reach some 30


def overlay(picture: Image, masks: Sequence[Mask], prompts: Sequence[Prompt] = (), strength: float = 0.5) -> Image:
    """The picture with its masks in colours and outlined, small ones on top; and what was asked: points and boxes."""
    canvas = np.asarray(picture.convert("RGB")).astype(np.float32)
    ordered = sorted(range(len(masks)), key=lambda i: -masks[i].area)
    for i in ordered:
        inside, (x0, y0, x1, y1) = masks[i].part.numpy(), masks[i].box
        window, colour = canvas[y0 : y1 + 1, x0 : x1 + 1], np.array(_colour(i), dtype=np.float32)
        window[inside] = window[inside] * (1 - strength) + colour * strength
        window[_rim(inside, max(1, max(picture.size) // 700))] = colour * 0.6
    drawn = PIL.Image.fromarray(canvas.round().astype(np.uint8))
    for prompt in prompts:
        _mark(drawn, prompt)
    return drawn


def as_picture(mask: Mask) -> Image:
    """One mask as a picture of one bit a pixel, white inside."""
    return PIL.Image.fromarray(mask.pixels.numpy().astype(np.uint8) * 255).convert("1")


def as_png(mask: Mask) -> bytes:
    """One mask as the bytes of a PNG of one bit a pixel, white inside."""
    out = io.BytesIO()
    as_picture(mask).save(out, "PNG")
    return out.getvalue()


def as_prompt(given: Image, size: tuple[int, int], fitted: tuple[int, int], side: int, image: int) -> torch.Tensor:
    """A mask drawn by a person (white is the object) as a prompt's logits [side, side] float32.

    size, fitted: (width, height) of the picture that it belongs to, and inside the encoder's square of ``image`` pixels
    a side; a mask of another size is stretched to it.
    """
    inner = (max(1, round(fitted[0] * side / image)), max(1, round(fitted[1] * side / image)))
    small = given.convert("L").resize(size).resize(inner, PIL.Image.Resampling.BILINEAR)
    values = torch.from_numpy(np.array(small)).float() / 127.5 - 1
    logits = torch.full((side, side), -SURE)
    logits[: inner[1], : inner[0]] = values * SURE
    return logits


def _colour(index: int) -> tuple[int, int, int]:
    """Hues a golden angle apart, so that neighbours in the list differ."""
    red, green, blue = colorsys.hsv_to_rgb((0.58 + index * 0.61803) % 1, 0.85, 1.0)
    return int(255 * red), int(255 * green), int(255 * blue)


def _rim(inside: np.ndarray, width: int) -> np.ndarray:
    """[H, W] bool: pixels of the mask within ``width`` of its outside."""
    core = inside
    for _ in range(width):
        padded = np.pad(core, 1)
        core = core & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return inside & ~core


def _mark(picture: Image, prompt: Prompt) -> None:
    pen = ImageDraw.Draw(picture)
    radius = max(3, max(picture.size) // 150)
    if prompt.box is not None:
        pen.rectangle(prompt.box, outline=OBJECT, width=max(1, radius // 3))
    for (x, y), label in zip(prompt.points, prompt.labels, strict=True):
        edges = (x - radius, y - radius, x + radius, y + radius)
        pen.ellipse(edges, fill=OBJECT if label else GROUND, outline=FRAME, width=max(1, radius // 3))
