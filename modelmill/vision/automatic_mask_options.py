"""Options, crops and point grid of the automatic mask generator.

The rules are those of SAM's automatic mask generator (Kirillov et al. 2023, arXiv:2304.02643,
appendix B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import torch

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote

MAX_LOGIT_MAGNITUDE = 1000.0  # no logit is so far from 0
CROP_EDGE_TOLERANCE_PIXELS = (
    20.0  # a box nearer to its crop's edge than this was probably cut off there
)


def _bounded_field(default: float, low: int, high: float) -> Any:
    """A field whose value is between ``low`` and ``high``; of the default's type."""
    return field(default=default, metadata={"limits": (low, high)})


@dataclass(frozen=True)
class AutomaticMaskOptions:
    """Options of the automatic mask generator, with SAM's names and defaults."""

    points_per_side: int = _bounded_field(32, 1, 256)
    points_per_batch: int = _bounded_field(64, 1, 1024)
    pred_iou_thresh: float = _bounded_field(0.88, 0, 1)
    stability_score_thresh: float = _bounded_field(0.95, 0, 1)
    stability_score_offset: float = _bounded_field(1.0, 0, MAX_LOGIT_MAGNITUDE)
    box_nms_thresh: float = _bounded_field(0.7, 0, 1)
    crop_n_layers: int = _bounded_field(0, 0, 4)
    crop_nms_thresh: float = _bounded_field(0.7, 0, 1)
    crop_overlap_ratio: float = 512 / 1500
    crop_n_points_downscale_factor: int = _bounded_field(1, 1, 64)
    min_mask_region_area: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, is_int = getattr(self, each.name), isinstance(each.default, int)
            if isinstance(value, bool) or not isinstance(value, int if is_int else (int, float)):
                raise RequestError(
                    f"{each.name} must be {'an integer' if is_int else 'a number'}, not "
                    f"{quote(value, 40)}"
                )
        for each in fields(self):
            value, limits = getattr(self, each.name), each.metadata.get("limits")
            if limits is not None and not limits[0] <= value <= limits[1]:
                raise RequestError(
                    f"{each.name}={quote(value, 40)} must be between {limits[0]} and {limits[1]:g}"
                )
        if self.min_mask_region_area < 0:
            raise RequestError("min_mask_region_area must not be negative")
        if not 0 <= self.crop_overlap_ratio < 1:
            raise RequestError(
                f"crop_overlap_ratio={self.crop_overlap_ratio} must be at least 0 and less than 1"
            )


@dataclass(frozen=True)
class Crop:
    """A crop of the picture: its box (x0, y0, x1, y1) and its layer (0: the whole picture)."""

    box: tuple[int, int, int, int]
    layer: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.box[2] - self.box[0], self.box[3] - self.box[1]


def make_crops(size: tuple[int, int], options: AutomaticMaskOptions) -> list[Crop]:
    """Make the crops: the whole picture, then 4, 16, … overlapping parts per layer.

    A picture that is too thin to be divided has fewer crops.

    Args:
        size: (width, height) of the picture.
        options: crop_n_layers and crop_overlap_ratio are used.
    """
    width, height = size
    crops = [Crop((0, 0, width, height), 0)]
    for layer in range(1, options.crop_n_layers + 1):
        side = 2**layer
        overlap = int(options.crop_overlap_ratio * min(size) * (2 / side))
        crop_width = math.ceil((overlap * (side - 1) + width) / side)
        crop_height = math.ceil((overlap * (side - 1) + height) / side)
        for i, j in product(range(side), range(side)):
            x, y = (crop_width - overlap) * i, (crop_height - overlap) * j
            if x < width and y < height:
                crops.append(
                    Crop((x, y, min(x + crop_width, width), min(y + crop_height, height)), layer)
                )
    return crops


def point_grid(crop: Crop, options: AutomaticMaskOptions) -> torch.Tensor:
    """Return points [P, 2] float64 in the crop's pixels: centres of equal cells, row by row."""
    side = max(1, options.points_per_side // options.crop_n_points_downscale_factor**crop.layer)
    centers = torch.linspace(1 / (2 * side), 1 - 1 / (2 * side), side, dtype=torch.float64)
    y, x = torch.meshgrid(centers, centers, indexing="ij")
    return torch.stack((x, y), -1).view(-1, 2) * torch.tensor(crop.size, dtype=torch.float64)


def touches_crop_edge(boxes: torch.Tensor, crop: Crop, size: tuple[int, int]) -> torch.Tensor:
    """Return [N] bool: which boxes [N, 4] touch a crop edge that is not the picture's edge."""
    left, top = crop.box[:2]
    shifted = boxes.float() + torch.tensor([left, top, left, top], device=boxes.device)
    crop_edge = torch.tensor(crop.box, dtype=torch.float32, device=boxes.device)
    image_edge = torch.tensor([0, 0, *size], dtype=torch.float32, device=boxes.device)
    # rtol=0 and this absolute tolerance, as in the original
    near_crop_edge = torch.isclose(
        shifted, crop_edge[None], atol=CROP_EDGE_TOLERANCE_PIXELS, rtol=0
    )
    near_image_edge = torch.isclose(
        shifted, image_edge[None], atol=CROP_EDGE_TOLERANCE_PIXELS, rtol=0
    )
    return (near_crop_edge & ~near_image_edge).any(1)
