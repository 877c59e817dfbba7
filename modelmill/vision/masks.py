"""Masks as values: run lengths, overlap, suppression. Pure functions on tensors of any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def box_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """IoU of boxes a [N, 4] and b [M, 4], float: [N, M].

    A box's area is width times height of its corners.
    """
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    return common / (area_a[:, None] + area_b[None] - common)


def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Indices of the boxes kept by greedy non-maximum suppression, best first; equal scores keep
    their order.

    boxes: [N, 4]. A box goes where it overlaps a better one by more than the threshold.
    """
    by_score = torch.argsort(scores, descending=True, stable=True)
    near = box_iou(boxes.float(), boxes.float()) > _floor_float32(threshold)
    close = near[by_score][:, by_score].cpu().numpy()
    alive = np.ones(len(by_score), dtype=bool)
    for i in range(len(by_score)):
        if alive[i]:
            alive[i + 1 :] &= ~close[i, i + 1 :]
    return by_score[torch.from_numpy(alive).to(by_score.device)]


def _floor_float32(threshold: float) -> float:
    """The largest float32 that is not more: torch rounds a threshold, and 0.3 as a float32 is more
    than 0.3.
    """
    near = np.float32(threshold)
    return float(near if float(near) <= threshold else np.nextafter(near, np.float32(-np.inf)))


def mask_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """IoU of two masks [..., H, W] bool; 1 where both are empty."""
    common = (a & b).sum((-2, -1))
    union = (a | b).sum((-2, -1))
    return torch.where(
        union > 0, common / union.clamp(min=1), torch.ones_like(union, dtype=torch.float32)
    )


def encode_rle(
    mask: torch.Tensor, corner: Sequence[int] = (0, 0), size: tuple[int, int] | None = None
) -> list[int]:
    """COCO's uncompressed run lengths of a mask [h, w] bool: column by column, background first.

    corner, size: the mask is a part of one of ``size`` (height, width), with its first pixel at
    ``corner`` (x, y), and nothing lies outside of it.
    """
    height, width = size or (int(mask.shape[0]), int(mask.shape[1]))
    x0, y0 = corner
    part = mask.numpy()
    framed = np.zeros((part.shape[0] + 2, part.shape[1]), dtype=bool)
    framed[1:-1] = part
    # where columns change, found row by row, since that is how they lie in memory, and put in order
    # then
    y, x = np.divmod(np.flatnonzero(framed[1:] ^ framed[:-1]), part.shape[1])
    edges = np.sort((x + x0) * height + y + y0)
    # a column that ends where the next begins goes on
    meets = np.flatnonzero(edges[1:-1:2] == edges[2::2])
    edges = np.delete(edges, np.concatenate((2 * meets + 1, 2 * meets + 2)))
    total = height * width
    ends = edges if len(edges) and edges[-1] == total else np.append(edges, total)
    found: list[int] = np.diff(ends, prepend=0).tolist()
    return found


def decode_rle(runs: Sequence[int], height: int, width: int) -> torch.Tensor:
    """The mask [H, W] bool of uncompressed run lengths.

    Raises ValueError where they do not fill it.
    """
    if sum(runs) != height * width or any(r < 0 for r in runs):
        raise ValueError(f"run lengths cover {sum(runs)} of {height * width} pixels")
    values = np.arange(len(runs)) % 2 == 1
    flat = np.repeat(values, np.asarray(runs, dtype=np.int64))
    return torch.from_numpy(flat.reshape(width, height).T.copy())


def to_coco_rle(runs: Sequence[int], height: int, width: int) -> dict[str, Any]:
    """COCO's compressed form: {"size": [H, W], "counts": text}.

    Each run but the first two is written as the difference to the run before the last; five bits a
    character, low
    bits first, a sixth bit saying that more follow (pycocotools' LEB-like code).
    """
    values = np.asarray(runs, dtype=np.int64)
    values[3:] -= np.asarray(runs[1:-2], dtype=np.int64)
    # 5·n bits hold −2^(5n−1) … 2^(5n−1) − 1
    reach = np.where(values < 0, -values - 1, values)
    count = 1 + np.asarray([reach >> (5 * n - 1) > 0 for n in range(1, 8)]).sum(0)
    place = np.arange(int(count.max(initial=1)))
    groups = (values[:, None] >> (5 * place)) & 31 | np.where(place < count[:, None] - 1, 32, 0)
    text = (groups + 48).astype(np.uint8)[place < count[:, None]].tobytes().decode("ascii")
    return {"size": [height, width], "counts": text}


def from_coco_rle(packed: dict[str, Any]) -> list[int]:
    """The run lengths of COCO's compressed form."""
    runs: list[int] = []
    value = shift = 0
    for character in packed["counts"]:
        bits = ord(character) - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    return runs
