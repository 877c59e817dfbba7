"""SAM's automatic mask generator in plain loops, from its published rules (arXiv:2304.02643,
appendix B).

Only the model is taken from the engine: what it answers to a batch of points is the same to the
bit. Crops, points, enlarging, filters, suppression, small regions and run lengths are done again
here, one mask at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F

from modelmill.vision.sam_model import SamModel


@dataclass
class PlainMask:
    """mask: of the whole picture. box: x0, y0, x1, y1 in it. crop: x0, y0, x1, y1."""

    mask: np.ndarray
    box: list[int]
    score: float
    stability: float
    point: tuple[float, float]
    crop: tuple[int, int, int, int]


def generate_masks(
    model: SamModel, picture: PIL.Image.Image, *, points_per_side: int, batch: int = 64,
    pred_iou: float = 0.88,
    stable: float = 0.95, offset: float = 1.0, box_nms: float = 0.7, layers: int = 0,
    crop_nms: float = 0.7,
    overlap: float = 512 / 1500, downscale: int = 1, min_area: int = 0,
) -> list[PlainMask]:  # fmt: skip
    """All masks, best score first."""
    width, height = picture.size
    masks: list[PlainMask] = []
    for crop, layer in make_crops(width, height, layers, overlap):
        part = picture.crop(crop)
        side = points_per_side // downscale**layer
        points = [
            ((i % side + 0.5) / side * part.width, (i // side + 0.5) / side * part.height)
            for i in range(side**2)
        ]
        inside: list[PlainMask] = []
        for start in range(0, len(points), batch):
            some = points[start : start + batch]
            for at, logits, score in decode_points(model, part, some):
                if score <= pred_iou:
                    continue
                big = upsample(model, logits, part.size)
                steady = int((big > offset).sum()) / max(int((big > -offset).sum()), 1)
                if np.float32(steady) < stable:
                    continue
                mask = big > 0
                box = mask_box(mask)
                if touches_crop_edge(box, crop, (width, height)):
                    continue
                pixels = np.zeros((height, width), dtype=bool)
                pixels[crop[1] : crop[3], crop[0] : crop[2]] = mask
                inside.append(
                    PlainMask(pixels, box, score, steady, (at[0] + crop[0], at[1] + crop[1]), crop)
                )
        for each in nms(inside, [f.score for f in inside], box_nms):
            each.box = [each.box[k] + crop[k % 2] for k in range(4)]
            masks.append(each)
    if layers:
        masks = nms(
            masks,
            [1 / ((f.crop[2] - f.crop[0]) * (f.crop[3] - f.crop[1])) for f in masks],
            crop_nms,
        )
    if min_area:
        untouched = []
        for each in masks:
            mask, holes = remove_small_regions(each.mask, min_area, holes=True)
            mask, islands = remove_small_regions(mask, min_area, holes=False)
            if holes or islands:
                each.mask, each.box = mask, mask_box(mask)
            untouched.append(0.0 if holes or islands else 1.0)
        masks = nms(masks, untouched, max(box_nms, crop_nms))
    return sorted(masks, key=lambda f: -f.score)


def make_crops(
    width: int, height: int, layers: int, overlap: float
) -> list[tuple[tuple[int, int, int, int], int]]:
    """The picture, then 4, 16, … boxes that overlap, and their layers."""
    crops = [((0, 0, width, height), 0)]
    for layer in range(1, layers + 1):
        count = 2**layer
        shared = int(overlap * min(width, height) * (2 / count))
        wide, tall = (math.ceil((shared * (count - 1) + n) / count) for n in (width, height))
        for i in range(count):
            for j in range(count):
                x, y = (wide - shared) * i, (tall - shared) * j
                crops.append(((x, y, min(x + wide, width), min(y + tall, height)), layer))
    return crops


@torch.inference_mode()
def decode_points(model: SamModel, part: PIL.Image.Image, points: list[tuple[float, float]]) -> Any:
    """(point, logits [4G, 4G], predicted IoU) of the three masks of each point."""
    scale = model.image_size / max(part.size)
    new = tuple(int(n * scale + 0.5) for n in part.size)
    at = torch.tensor(
        [[[x * (new[0] / part.width), y * (new[1] / part.height)], [0.0, 0.0]] for x, y in points]
    )
    labels = torch.tensor([[1, -1]] * len(points))
    embedding = model.embed_image(part).embedding
    logits, scores = model.model.decode_masks(embedding, at, labels, None, model.vision)  # type: ignore[operator]
    for i, point in enumerate(points):
        for k in (1, 2, 3):
            yield point, logits[i, k], float(scores[i, k])


def upsample(model: SamModel, logits: torch.Tensor, size: tuple[int, int]) -> np.ndarray:
    """To the encoder's square, without its padding, to the picture's size."""
    scale = model.image_size / max(size)
    wide, tall = (int(n * scale + 0.5) for n in size)
    big = F.interpolate(
        logits[None, None],
        (model.image_size, model.image_size),
        mode="bilinear",
        align_corners=False,
    )
    big = F.interpolate(
        big[..., :tall, :wide], (size[1], size[0]), mode="bilinear", align_corners=False
    )
    return big[0, 0].numpy()


def mask_box(mask: np.ndarray) -> list[int]:
    ys, xs = np.nonzero(mask)
    return [int(v) for v in (xs.min(), ys.min(), xs.max(), ys.max())] if len(xs) else [0, 0, 0, 0]


def touches_crop_edge(
    box: list[int], crop: tuple[int, int, int, int], size: tuple[int, int]
) -> bool:
    """Within 20 pixels of an edge of the crop that is none of the picture's."""
    rim = (0, 0, *size)
    placed = [box[k] + crop[k % 2] for k in range(4)]
    return any(
        abs(placed[k] - crop[k]) <= 20 and not abs(placed[k] - rim[k]) <= 20 for k in range(4)
    )


def nms(masks: list[PlainMask], scores: list[float], threshold: float) -> list[PlainMask]:
    """The best first; what overlaps a better one's box by more than the threshold goes."""
    survivors: list[PlainMask] = []
    for i in sorted(range(len(masks)), key=lambda i: -np.float32(scores[i])):
        if all(iou(masks[i].box, other.box) <= threshold for other in survivors):
            survivors.append(masks[i])
    return survivors


def iou(a: list[int], b: list[int]) -> float:
    wide, tall = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    common = max(wide, 0) * max(tall, 0)
    area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return float(np.float32(common) / np.float32(area)) if area else math.nan


def remove_small_regions(mask: np.ndarray, min_pixels: int, holes: bool) -> tuple[np.ndarray, bool]:
    """Small holes filled, or small islands dropped (of nothing but small ones the largest
    stays).
    """
    ground = ~mask if holes else mask
    labels, sizes = label_regions(ground)
    small = [i + 1 for i, size in enumerate(sizes) if size < min_pixels]
    if not small:
        return mask, False
    if holes:
        return mask | np.isin(labels, small), True
    labels_to_keep = [i + 1 for i, size in enumerate(sizes) if size >= min_pixels] or [
        int(np.argmax(sizes)) + 1
    ]
    return np.isin(labels, labels_to_keep), True


def label_regions(ground: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Regions of neighbours, corners included, by the first pixel, and their sizes."""
    labels = np.zeros(ground.shape, dtype=np.int64)
    sizes: list[int] = []
    height, width = ground.shape
    for y, x in np.argwhere(ground).tolist():
        if labels[y, x]:
            continue
        sizes.append(0)
        labels[y, x] = len(sizes)
        left = [(y, x)]
        while left:
            a, b = left.pop()
            sizes[-1] += 1
            for i in range(max(0, a - 1), min(height, a + 2)):
                for j in range(max(0, b - 1), min(width, b + 2)):
                    if ground[i, j] and not labels[i, j]:
                        labels[i, j] = len(sizes)
                        left.append((i, j))
    return labels, sizes


def encode_rle(mask: np.ndarray) -> list[int]:
    """COCO's run lengths: column by column, the background first."""
    flat = mask.T.reshape(-1)
    runs, current, start = [], False, 0
    for at in [*(np.flatnonzero(flat[1:] != flat[:-1]) + 1).tolist(), len(flat)]:
        if start == 0 and flat[0]:
            runs.append(0)
            current = True
        runs.append(at - start)
        start, current = at, not current
    return runs
