"""Options, crops and point grid of the automatic mask generator.

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
CROP_EDGE_PIXELS = 20.0  # a box nearer to its crop's edge than this was probably cut off there


@dataclass(frozen=True)
class AutomaticMaskOptions:
    """Options of the automatic mask generator, with SAM's names and defaults."""

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
                    f"{each.name} must be {'an integer' if is_int else 'a number'}, not "
                    f"{quote(value, 40)}"
                )
        counts = {
            "points_per_side": 256,
            "points_per_batch": 1024,
            "crop_n_points_downscale_factor": 64,
        }
        for name, max_value in counts.items():
            if not 1 <= getattr(self, name) <= max_value:
                raise RequestError(
                    f"{name}={quote(getattr(self, name), 40)} must be between 1 and {max_value}"
                )
        if not 0 <= self.crop_n_layers <= 4:
            raise RequestError(
                f"crop_n_layers={quote(self.crop_n_layers, 40)} must be between 0 and 4"
            )
        if self.min_mask_region_area < 0:
            raise RequestError("min_mask_region_area must not be negative")
        for name in (
            "pred_iou_thresh",
            "stability_score_thresh",
            "box_nms_thresh",
            "crop_nms_thresh",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if not 0 <= self.crop_overlap_ratio < 1:
            raise RequestError(
                f"crop_overlap_ratio={self.crop_overlap_ratio} must be at least 0 and less than 1"
            )
        if not 0 <= self.stability_score_offset <= MAX_LOGIT_MAGNITUDE:
            raise RequestError(
                f"stability_score_offset={self.stability_score_offset} must be between 0 and "
                f"{MAX_LOGIT_MAGNITUDE:g}"
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
    near_crop_edge = torch.isclose(shifted, crop_edge[None], atol=CROP_EDGE_PIXELS, rtol=0)
    near_image_edge = torch.isclose(shifted, image_edge[None], atol=CROP_EDGE_PIXELS, rtol=0)
    return (near_crop_edge & ~near_image_edge).any(1)
