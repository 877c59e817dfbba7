"""Run-length encoding, IoU and non-maximum suppression of masks and boxes, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def box_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the IoU [N, M] of boxes a [N, 4] and b [M, 4], float.

    A box's area is (x1 − x0) · (y1 − y0).
    """
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    intersection = (high - low).clamp(min=0).prod(-1)
    return intersection / (area_a[:, None] + area_b[None] - intersection)


def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Greedy non-maximum suppression.

    Args:
        boxes: [N, 4].
        scores: [N]; equal scores keep their order.
        threshold: a box is dropped if its IoU with a better one is larger.

    Returns:
        Indices of the boxes that are kept, best first.
    """
    by_score = torch.argsort(scores, descending=True, stable=True)
    overlaps = box_iou(boxes.float(), boxes.float()) > _floor_float32(threshold)
    suppresses = overlaps[by_score][:, by_score].cpu().numpy()
    keep = np.ones(len(by_score), dtype=bool)
    for i in range(len(by_score)):
        if keep[i]:
            keep[i + 1 :] &= ~suppresses[i, i + 1 :]
    return by_score[torch.from_numpy(keep).to(by_score.device)]


def _floor_float32(threshold: float) -> float:
    """Return the largest float32 that is at most ``threshold`` (0.3 in float32 is above 0.3)."""
    nearest = np.float32(threshold)
    return float(
        nearest if float(nearest) <= threshold else np.nextafter(nearest, np.float32(-np.inf))
    )


def elementwise_mask_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the IoU of two masks [..., H, W] bool; 1 where both are empty."""
    intersection = (a & b).sum((-2, -1))
    union = (a | b).sum((-2, -1))
    return torch.where(
        union > 0, intersection / union.clamp(min=1), torch.ones_like(union, dtype=torch.float32)
    )


def encode_rle(
    mask: torch.Tensor, corner: Sequence[int] = (0, 0), size: tuple[int, int] | None = None
) -> list[int]:
    """Encode a mask as COCO's uncompressed run lengths: column by column, background first.

    Args:
        mask: [h, w] bool: the whole mask, or the part of it that contains all its pixels.
        corner: (x, y) of the first pixel of ``mask`` in the whole mask.
        size: (height, width) of the whole mask; that of ``mask`` if None.
    """
    height, width = size or (int(mask.shape[0]), int(mask.shape[1]))
    x0, y0 = corner
    pixels = mask.numpy()
    padded = np.zeros((pixels.shape[0] + 2, pixels.shape[1]), dtype=bool)
    padded[1:-1] = pixels
    # find the changes along columns in row-major (memory) order, then sort them
    y, x = np.divmod(np.flatnonzero(padded[1:] ^ padded[:-1]), pixels.shape[1])
    edges = np.sort((x + x0) * height + y + y0)
    # join a run that ends a column with one that begins the next
    joined = np.flatnonzero(edges[1:-1:2] == edges[2::2])
    edges = np.delete(edges, np.concatenate((2 * joined + 1, 2 * joined + 2)))
    total = height * width
    ends = edges if len(edges) and edges[-1] == total else np.append(edges, total)
    runs: list[int] = np.diff(ends, prepend=0).tolist()
    return runs


def to_coco_rle(runs: Sequence[int], height: int, width: int) -> dict[str, Any]:
    """Encode run lengths in COCO's compressed form: {"size": [H, W], "counts": text}.

    From the fourth on, a run is stored as its difference to the second run before it. A character
    holds five bits, low bits first; its sixth bit says that more follow (pycocotools' variant of
    LEB128).
    """
    values = np.asarray(runs, dtype=np.int64)
    values[3:] -= np.asarray(runs[1:-2], dtype=np.int64)
    # 5·n bits hold −2^(5n−1) … 2^(5n−1) − 1
    magnitude = np.where(values < 0, -values - 1, values)
    count = 1 + np.asarray([magnitude >> (5 * n - 1) > 0 for n in range(1, 8)]).sum(0)
    digit = np.arange(int(count.max(initial=1)))
    groups = (values[:, None] >> (5 * digit)) & 31 | np.where(digit < count[:, None] - 1, 32, 0)
    text = (groups + 48).astype(np.uint8)[digit < count[:, None]].tobytes().decode("ascii")
    return {"size": [height, width], "counts": text}
