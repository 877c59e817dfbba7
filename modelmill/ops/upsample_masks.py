"""Mask logits upsampled to an image's size and thresholded at 0; with box, area and stability."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration

# Pixels, boxes and areas are exact; the ratio of two areas is rounded once.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}
Masks = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None]


class UpsampleMasksInputs(NamedTuple):
    """Mask logits, the sizes of an image and the results that are returned.

    Attributes:
        logits: [N, G, G] float32.
        image: side of the encoder's square input in pixels.
        resized: (width, height) of the image inside that square.
        size: (width, height) of the original image.
        offset: compute the stability, the IoU of the masks thresholded at +offset and −offset.
        pixels: return the masks themselves.
    """

    logits: torch.Tensor
    image: int
    resized: tuple[int, int]
    size: tuple[int, int]
    offset: float | None = None
    pixels: bool = True


DECLARATION = OpDeclaration(inputs=UpsampleMasksInputs)


def upsample_masks(inputs: UpsampleMasksInputs) -> Masks:
    """Upsample mask logits as SAM does (``upsample_logits``) and threshold them at 0.

    Returns:
        (masks [N, height, width] bool, or None if pixels is False; boxes [N, 4] int64, x0, y0, x1,
        y1 of the outermost pixels, zeros for an empty mask; areas [N] int64; stability [N] float32,
        or None if offset is None).
    """
    logits, image, resized, size, offset, pixels = inputs
    full = upsample_logits(logits[:, None], image, resized, size)[:, 0]
    masks = full > 0
    stability_iou = None
    if offset is not None:
        high = (full > offset).sum((-2, -1), dtype=torch.int32)
        low = (full > -offset).sum((-2, -1), dtype=torch.int32)
        stability_iou = high / low.clamp(min=1)
    return masks if pixels else None, masks_to_boxes(masks), masks.sum((-2, -1)), stability_iou


def upsample_logits(
    logits: torch.Tensor, image: int, resized: tuple[int, int], size: tuple[int, int]
) -> torch.Tensor:
    """Upsample logits to the encoder's square, crop the padding, and resize to the original image.

    Args:
        logits: [N, M, G, G].
        image: side of the encoder's square input in pixels.
        resized: (width, height) of the image inside that square.
        size: (width, height) of the original image.

    Returns:
        [N, M, height, width].
    """
    square = F.interpolate(logits, (image, image), mode="bilinear", align_corners=False)
    square = square[..., : resized[1], : resized[0]]
    return F.interpolate(square, (size[1], size[0]), mode="bilinear", align_corners=False)


def masks_to_boxes(masks: torch.Tensor) -> torch.Tensor:
    """Bounding boxes of masks […, H, W] bool.

    Returns:
        […, 4] int64: x0, y0, x1, y1 of the outermost pixels, inclusive; zeros for an empty mask.
    """
    height, width = masks.shape[-2:]
    rows, columns = masks.any(-1), masks.any(-2)
    y = torch.arange(height, device=masks.device)
    x = torch.arange(width, device=masks.device)
    top = torch.where(rows, y, height).amin(-1)
    bottom = torch.where(rows, y, -1).amax(-1)
    left = torch.where(columns, x, width).amin(-1)
    right = torch.where(columns, x, -1).amax(-1)
    boxes = torch.stack((left, top, right, bottom), -1)
    return torch.where((right >= 0)[..., None], boxes, torch.zeros_like(boxes))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Wide, tall, thin and tiny images, larger and smaller than the square; several masks."""
    if device == "cpu" and dtype is not torch.float32:
        return  # the logits are always float32
    shapes = [
        (3, 16, 64, (64, 43), (90, 60)),
        (1, 8, 32, (32, 32), (32, 32)),
        (2, 16, 64, (20, 64), (33, 107)),
        (1, 16, 64, (64, 1), (400, 1)),
        (2, 8, 32, (32, 24), (12, 9)),
    ]
    if device != "cpu":
        shapes += [
            (24, 256, 1024, (1024, 683), (1800, 1200)),
            (65, 256, 1024, (1024, 684), (800, 534)),
        ]
    for seed, (count, side, image, fitted, size) in enumerate(shapes):
        logits = randn(count, side, side, device=device, dtype=torch.float32, seed=seed, scale=6.0)
        if side > 100:  # steep edges, so that no pixel is so close to 0 that rounding decides
            logits = (
                F.interpolate(logits[:, None, ::16, ::16].sign() * 7, (side, side))[:, 0]
                + logits / 30
            )
        # a mask that covers a small part of the image
        logits[0, side // 2 :] = -7.0
        args = {
            "logits": logits,
            "image": image,
            "resized": fitted,
            "size": size,
            "offset": 1.0 if seed % 2 else None,
        }
        moved = nbytes(logits) + count * size[0] * size[1]
        yield Case(f"{count}x{side}->{size[0]}x{size[1]}", args, moved)
