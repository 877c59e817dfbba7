"""Masks as values: run lengths, overlap, suppression. Pure functions on tensors of any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """IoU of boxes a [N, 4] and b [M, 4], float: [N, M]. A box's area is width times height of its corners."""
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    return common / (area_a[:, None] + area_b[None] - common)


def suppressed(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Indices of the boxes kept by greedy non-maximum suppression, best first; equal scores keep their order.

    boxes: [N, 4]. A box goes where it overlaps a better one by more than the threshold.
    """
    order = torch.argsort(scores, descending=True, stable=True)
    near = overlap(boxes.float(), boxes.float()) > threshold
    close = near[order][:, order].cpu().numpy()
    alive = np.ones(len(order), dtype=bool)
    for i in range(len(order)):
        if alive[i]:
            alive[i + 1 :] &= ~close[i, i + 1 :]
    return order[torch.from_numpy(alive).to(order.device)]


def mask_iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """IoU of two masks [..., H, W] bool; 1 where both are empty."""
    common = (a & b).sum((-2, -1))
    union = (a | b).sum((-2, -1))
    return torch.where(union > 0, common / union.clamp(min=1), torch.ones_like(union, dtype=torch.float32))


def runs_of(masks: torch.Tensor) -> list[list[int]]:
    """COCO's uncompressed run lengths of masks [N, H, W] bool: column by column, background first."""
    count, height, width = masks.shape
    flat = masks.permute(0, 2, 1).reshape(count, -1)
    change = (flat[:, 1:] ^ flat[:, :-1]).nonzero().cpu()
    first = flat[:, 0].cpu().tolist()
    at, where = change[:, 0].numpy(), change[:, 1].numpy() + 1
    starts = np.searchsorted(at, np.arange(count + 1))
    found = []
    for i in range(count):
        edges = np.concatenate(([0], where[starts[i] : starts[i + 1]], [height * width]))
        runs = np.diff(edges).tolist()
        found.append([0, *runs] if first[i] else runs)
    return found


def mask_of(runs: Sequence[int], height: int, width: int) -> torch.Tensor:
    """The mask [H, W] bool of uncompressed run lengths. Raises ValueError where they do not fill it."""
    if sum(runs) != height * width or any(r < 0 for r in runs):
        raise ValueError(f"run lengths cover {sum(runs)} of {height * width} pixels")
    values = np.arange(len(runs)) % 2 == 1
    flat = np.repeat(values, np.asarray(runs, dtype=np.int64))
    return torch.from_numpy(flat.reshape(width, height).T.copy())


def coco(runs: Sequence[int], height: int, width: int) -> dict[str, Any]:
    """COCO's compressed form: {"size": [H, W], "counts": text}.

    Each run but the first two is written as the difference to the run before the last; five bits a character, low
    bits first, a sixth bit saying that more follow (pycocotools' LEB-like code).
    """
    text = []
    for i, run in enumerate(runs):
        left = run - runs[i - 2] if i > 2 else run
        while True:
            low = left & 31
            left >>= 5
            more = left != -1 if low & 16 else left != 0
            text.append(chr(48 + (low | 32 if more else low)))
            if not more:
                break
    return {"size": [height, width], "counts": "".join(text)}


def from_coco(packed: dict[str, Any]) -> list[int]:
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
