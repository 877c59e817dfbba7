"""Which points to ask at, and which answers to keep, when all of a picture is segmented.

The rules are those of SAM's automatic mask generator (Kirillov et al. 2023, arXiv:2304.02643,
appendix B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import product

import torch

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote

MAX_LOGIT_MAGNITUDE = 1000.0  # no logit is so far from 0
CROP_EDGE_PIXELS = 20.0  # a box nearer to its crop's edge than this was probably cut there


@dataclass(frozen=True)
class AutomaticMaskOptions:
    """Options, with the original's defaults."""

    points_per_side: int = 32
    points_per_batch: int = 64
    pred_iou_thresh: float = 0.88
    stability_score_thresh: float = 0.95
    stability_score_offset: float = 1.0
    box_nms_thresh: float = 0.7
    crop_n_layers: int = 0
    crop_nms_thresh: float = 0.7
    crop_overlap_ratio: float = 512 / 1500
    crop_n_points_downscale_factor: int = 1
    min_mask_region_area: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, is_int = getattr(self, each.name), isinstance(each.default, int)
            if isinstance(value, bool) or not isinstance(value, int if is_int else (int, float)):
                raise RequestError(
                    f"{each.name} is a {'is_int ' if is_int else ''}number, not {quote(value, 40)}"
                )
        counts = {
            "points_per_side": 256,
            "points_per_batch": 1024,
            "crop_n_points_downscale_factor": 64,
        }
        for name, max_value in counts.items():
            if not 1 <= getattr(self, name) <= max_value:
                raise RequestError(
                    f"{name}={quote(getattr(self, name), 40)} is outside 1…{max_value}"
                )
        if not 0 <= self.crop_n_layers <= 4:
            raise RequestError(f"crop_n_layers={quote(self.crop_n_layers, 40)} is outside 0…4")
        if self.min_mask_region_area < 0:
            raise RequestError("min_mask_region_area must not be negative")
        for name in (
            "pred_iou_thresh",
            "stability_score_thresh",
            "box_nms_thresh",
            "crop_nms_thresh",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(f"{name}={getattr(self, name)} is outside 0…1")
        if not 0 <= self.crop_overlap_ratio < 1:
            raise RequestError(f"crop_overlap_ratio={self.crop_overlap_ratio} is outside 0…1")
        if not 0 <= self.stability_score_offset <= MAX_LOGIT_MAGNITUDE:
            raise RequestError(
                f"stability_score_offset={self.stability_score_offset} is outside "
                f"0…{MAX_LOGIT_MAGNITUDE:g}"
            )


@dataclass(frozen=True)
class Crop:
    """A part of the picture, x0, y0, x1, y1, and how often it was divided to get there."""

    box: tuple[int, int, int, int]
    layer: int

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)."""
        return self.box[2] - self.box[0], self.box[3] - self.box[1]


def make_crops(size: tuple[int, int], options: AutomaticMaskOptions) -> list[Crop]:
    """The whole picture, then for each layer 4, 16, … overlapping parts; of a picture too thin to
    be divided, fewer.

    size: (width, height).
    """
    width, height = size
    found = [Crop((0, 0, width, height), 0)]
    for layer in range(1, options.crop_n_layers + 1):
        side = 2**layer
        common = int(options.crop_overlap_ratio * min(size) * (2 / side))
        wide = math.ceil((common * (side - 1) + width) / side)
        tall = math.ceil((common * (side - 1) + height) / side)
        for i, j in product(range(side), range(side)):
            x, y = (wide - common) * i, (tall - common) * j
            if x < width and y < height:
                found.append(Crop((x, y, min(x + wide, width), min(y + tall, height)), layer))
    return found


def point_grid(crop: Crop, options: AutomaticMaskOptions) -> torch.Tensor:
    """Points [P, 2] float64 in the crop's pixels, row by row, in the middle of equal cells."""
    side = max(1, options.points_per_side // options.crop_n_points_downscale_factor**crop.layer)
    at = torch.linspace(1 / (2 * side), 1 - 1 / (2 * side), side, dtype=torch.float64)
    y, x = torch.meshgrid(at, at, indexing="ij")
    return torch.stack((x, y), -1).view(-1, 2) * torch.tensor(crop.size, dtype=torch.float64)


def touches_crop_edge(boxes: torch.Tensor, crop: Crop, size: tuple[int, int]) -> torch.Tensor:
    """Whether boxes [N, 4] of a crop touch its edge where that is not the picture's: [N] bool."""
    left, top = crop.box[:2]
    placed = boxes.float() + torch.tensor([left, top, left, top], device=boxes.device)
    edge = torch.tensor(crop.box, dtype=torch.float32, device=boxes.device)
    rim = torch.tensor([0, 0, *size], dtype=torch.float32, device=boxes.device)
    # torch.isclose's own relative slack is part of the original
    near = torch.isclose(placed, edge[None], atol=CROP_EDGE_PIXELS, rtol=0)
    outer = torch.isclose(placed, rim[None], atol=CROP_EDGE_PIXELS, rtol=0)
    return (near & ~outer).any(1)
