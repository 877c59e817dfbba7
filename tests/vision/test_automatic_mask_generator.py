"""Automatic masks against the generator written again in plain loops (plain_everything.py): the
same run lengths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from modelmill.core.errors import RequestError
from modelmill.models import sam
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import select_backends
from modelmill.vision.automatic_mask_options import (
    AutomaticMaskOptions,
    Crop,
    make_crops,
    point_grid,
    touches_crop_edge,
)
from modelmill.vision.masks import to_coco_rle
from modelmill.vision.sam_model import SamModel
from tests.models.sam_seeded import small_state
from tests.models.test_sam import make_model
from tests.vision import plain_mask_generator as plain
from tests.vision.coco_rle import from_coco_rle


def assert_equal_masks(
    model: SamModel, picture: PIL.Image.Image, names: dict[str, str], options: dict[str, Any]
) -> int:
    """Compare; returns how many masks there are. names: our option → the plain one's."""
    actual = model.generate_masks(picture, AutomaticMaskOptions(**options))
    expected = plain.generate_masks(
        model, picture, **{names[name]: value for name, value in options.items()}
    )
    assert len(actual) == len(expected)
    for mask, reference in zip(actual, expected, strict=True):
        assert mask.score == reference.score
        assert mask.box == tuple(reference.box)
        assert mask.point == pytest.approx(reference.point, abs=1e-9)
        assert mask.crop == reference.crop
        assert mask.stability == pytest.approx(reference.stability, rel=1e-6)
        runs = plain.encode_rle(reference.mask)
        assert mask.to_dict(rle=True)["rle"] == to_coco_rle(runs, *reference.mask.shape)
        assert from_coco_rle(mask.to_dict(rle=True)["rle"]) == runs
        assert mask.area == int(reference.mask.sum())
    return len(actual)


NAMES = {
    "points_per_side": "points_per_side", "points_per_batch": "batch",
    "pred_iou_thresh": "pred_iou",
    "stability_score_thresh": "stable", "stability_score_offset": "offset",
    "box_nms_thresh": "box_nms",
    "crop_n_layers": "layers", "crop_nms_thresh": "crop_nms", "crop_overlap_ratio": "overlap",
    "crop_n_points_downscale_factor": "downscale", "min_mask_region_area": "min_area",
}  # fmt: skip


def blots(side: int) -> Any:
    """In the decoder's place: three ragged blots around each point, with holes and islands, and
    scores to filter by.
    """
    y, x = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij")
    noise = torch.randn(3, side, side, generator=torch.Generator().manual_seed(7))

    def decode(embedding: Any, points: torch.Tensor, labels: Any, masks: Any, vision: Any) -> Any:
        at = points[:, :1, :, None, None] / 4
        reach = torch.tensor([3.0, 7.0, 15.0]).view(1, 3, 1, 1)
        apart = ((x - at[:, :, 0]) ** 2 + (y - at[:, :, 1]) ** 2).sqrt()
        logits = (reach - apart) * 2 + 3 * noise
        scores = 0.5 + 0.5 * torch.frac(
            points[:, :1, 0] * 7.31 + points[:, :1, 1] * 3.7 + torch.arange(3) * 0.41
        )
        return torch.cat((logits[:, :1], logits), 1), torch.cat((scores[:, :1], scores), 1)

    return decode


@pytest.mark.parametrize(("options", "least"), [
    ({"points_per_side": 8, "points_per_batch": 5}, 20),
    ({"points_per_side": 6, "crop_n_layers": 1, "crop_n_points_downscale_factor": 2,
    "crop_nms_thresh": 0.5}, 20),
    ({"points_per_side": 3, "crop_n_layers": 2, "crop_n_points_downscale_factor": 2}, 10),
    ({"points_per_side": 3, "min_mask_region_area": 40, "box_nms_thresh": 0.5}, 4),
    ({"points_per_side": 7, "stability_score_offset": 0.5, "stability_score_thresh": 0.8}, 10),
    ({"points_per_side": 3, "pred_iou_thresh": 0.999}, 0),
])  # fmt: skip
def test_blots_are_kept_as_plain_loops_keep_them(
    options: dict[str, Any], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sam_model = SamModel(
        make_model(small_state(2)),
        VisionContext(select_backends("cpu")),
        sam.IMAGE_MEAN,
        sam.IMAGE_STD,
    )
    monkeypatch.setattr(sam_model.model, "decode_masks", blots(sam_model.image_size // 4))
    values = np.random.default_rng(3).integers(0, 255, (90, 140, 3), dtype=np.uint8)
    picture = PIL.Image.fromarray(values)
    settings = {"pred_iou_thresh": 0.6, "stability_score_thresh": 0.3} | options
    assert assert_equal_masks(sam_model, picture, NAMES, settings) >= least


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"points_per_side": 12},
    {"points_per_side": 6, "crop_n_layers": 1, "crop_n_points_downscale_factor": 2,
    "min_mask_region_area": 100},
])  # fmt: skip
def test_mobilesam_finds_what_plain_loops_find(shared: Path, options: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    model = make_model(load_file(shared / "data/models/mobile_sam/mobile_sam.safetensors"))
    sam_model = SamModel(
        model, VisionContext(select_backends("cpu")), sam.IMAGE_MEAN, sam.IMAGE_STD
    )
    picture = PIL.Image.open(shared / "data/images/dog.jpg").convert("RGB")
    if "min_mask_region_area" in options:
        picture = picture.resize((300, 200))  # plain loops visit every pixel
    count = assert_equal_masks(sam_model, picture, NAMES, options)
    assert count >= 8


def test_crops_and_grids_of_the_original() -> None:
    # computed by hand from the published rule for 1800 × 1200 pixels and one layer
    crops = make_crops((1800, 1200), AutomaticMaskOptions(crop_n_layers=1))
    assert [c.box for c in crops] == [
        (0, 0, 1800, 1200),
        (0, 0, 1105, 805),
        (0, 396, 1105, 1200),
        (696, 0, 1800, 805),
        (696, 396, 1800, 1200),
    ]
    grid = point_grid(crops[0], AutomaticMaskOptions(points_per_side=2))
    assert grid.tolist() == [[450, 300], [1350, 300], [450, 900], [1350, 900]]
    assert (
        len(
            point_grid(
                crops[1], AutomaticMaskOptions(points_per_side=8, crop_n_points_downscale_factor=2)
            )
        )
        == 16
    )


def test_boxes_cut_by_a_crop() -> None:
    crop = Crop((100, 0, 500, 400), 1)
    boxes = torch.tensor(
        [[0, 50, 40, 90], [60, 60, 90, 90], [200, 0, 300, 390], [300, 100, 399, 200]]
    )
    # left edge; inside; near the crop's lower edge; its right edge
    assert touches_crop_edge(boxes, crop, (800, 600)).tolist() == [True, False, True, True]
    # the picture's own edges cut nothing
    assert touches_crop_edge(boxes, Crop((0, 0, 400, 400), 0), (400, 400)).tolist() == [False] * 4


@pytest.mark.parametrize(
    "wrong", [{"points_per_side": 0}, {"crop_n_layers": 9}, {"box_nms_thresh": 1.5}]
)
def test_wrong_options(wrong: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        AutomaticMaskOptions(**wrong)
