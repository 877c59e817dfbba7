"""Mask logits enlarged to a picture's size and cut at 0; with box, area and stability."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, nbytes, randn

# Pixels, boxes and areas are exact; a share of two areas is rounded once.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}
Masks = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None]


def upsample_masks(
    logits: torch.Tensor,
    image: int,
    resized: tuple[int, int],
    size: tuple[int, int],
    offset: float | None = None,
    pixels: bool = True,
) -> Masks:
    """What lies above 0 of logits [N, G, G] float32, enlarged as SAM does it (``enlarged``).

    image: pixels a side of the encoder's square. resized, size: (width, height) inside it and of
    the picture. Returns (masks [N, height, width] bool, or None where pixels is False; boxes [N, 4]
    int64, x0, y0, x1, y1 of the outermost pixels, zeros for an empty mask; areas [N] int64;
    stability [N] float32, or None where offset is None: the IoU of the masks cut at +offset and at
    −offset).
    """
    big = upsample_logits(logits[:, None], image, resized, size)[:, 0]
    masks = big > 0
    steady = None
    if offset is not None:
        high = (big > offset).sum((-2, -1), dtype=torch.int32)
        low = (big > -offset).sum((-2, -1), dtype=torch.int32)
        steady = high / low.clamp(min=1)
    return masks if pixels else None, masks_to_boxes(masks), masks.sum((-2, -1)), steady


def upsample_logits(
    logits: torch.Tensor, image: int, resized: tuple[int, int], size: tuple[int, int]
) -> torch.Tensor:
    """Logits [N, M, G, G] → [N, M, height, width] of the picture: up to the encoder's square,
    cropped, and up again.

    image: pixels a side of that square. resized, size: (width, height) inside it and of the
    picture.
    """
    big = F.interpolate(logits, (image, image), mode="bilinear", align_corners=False)
    big = big[..., : resized[1], : resized[0]]
    return F.interpolate(big, (size[1], size[0]), mode="bilinear", align_corners=False)


def masks_to_boxes(masks: torch.Tensor) -> torch.Tensor:
    """[…, H, W] bool → […, 4] int64: x0, y0, x1, y1 of the outermost pixels, inclusive; zeros for
    an empty mask.
    """
    height, width = masks.shape[-2:]
    rows, columns = masks.any(-1), masks.any(-2)
    y = torch.arange(height, device=masks.device)
    x = torch.arange(width, device=masks.device)
    top = torch.where(rows, y, height).amin(-1)
    bottom = torch.where(rows, y, -1).amax(-1)
    left = torch.where(columns, x, width).amin(-1)
    right = torch.where(columns, x, -1).amax(-1)
    found = torch.stack((left, top, right, bottom), -1)
    return torch.where((right >= 0)[..., None], found, torch.zeros_like(found))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Wide, tall, thin and tiny pictures, larger and smaller than the square; three masks of a
    click.
    """
    if device == "cpu" and dtype is not torch.float32:
        return  # they would be the same
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
        if side > 100:  # steep edges: no pixel of millions is so near 0 that rounding decides
            logits = (
                F.interpolate(logits[:, None, ::16, ::16].sign() * 7, (side, side))[:, 0]
                + logits / 30
            )
        # one whose mask is a small part of the picture
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
