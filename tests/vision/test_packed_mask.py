"""Masks as bits: the same pixels in an eighth of the bytes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modelmill.models import sam
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import select_backends
from modelmill.vision.automatic_mask_options import AutomaticMaskOptions
from modelmill.vision.packed_mask import PackedMask, _pack_mask_bits_torch, pack_mask_bits
from modelmill.vision.sam_model import SamModel
from tests.models.sam_seeded import small_state
from tests.models.test_sam import make_model


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 40), st.integers(1, 6), st.data())
@example(16, 2, None)
def test_a_box_of_bits_is_the_box_of_pixels(width: int, height: int, data: st.DataObject) -> None:
    x = [0, width - 1] if data is None else [data.draw(st.integers(0, width - 1)) for _ in "ab"]
    y = [0, height - 1] if data is None else [data.draw(st.integers(0, height - 1)) for _ in "ab"]
    (x0, x1), (y0, y1) = sorted(x), sorted(y)
    masks = torch.from_numpy(np.random.default_rng(width * height).random((2, height, width)) < 0.5)
    rows = pack_mask_bits(masks)
    assert rows.shape == (2, height, -(-width // 8))
    assert torch.equal(_pack_mask_bits_torch(masks), rows)
    for mask, packed in zip(masks, rows, strict=True):
        part = mask[y0 : y1 + 1, x0 : x1 + 1]
        unpacked = PackedMask.crop(packed, (x0, y0, x1, y1)).unpack()
        assert unpacked.dtype is torch.bool
        assert torch.equal(unpacked, part)
        assert torch.equal(PackedMask.pack(part).unpack(), part)


def test_everything_keeps_an_eighth_of_a_byte_a_pixel() -> None:
    """Counts what the masks hold on to, which is not a view of something larger."""
    model = make_model(small_state())
    segmenter = SamModel(
        model, VisionContext(select_backends("cpu")), sam.IMAGE_MEAN, sam.IMAGE_STD
    )
    picture = np.random.default_rng(0).integers(0, 256, (600, 900, 3), dtype=np.uint8)
    masks = segmenter.generate_masks(
        picture,
        AutomaticMaskOptions(
            points_per_side=4, pred_iou_thresh=0.0, stability_score_thresh=0.0, box_nms_thresh=1.0
        ),
    )
    assert len(masks) > 5
    num_bytes = num_pixels = 0
    for mask in masks:
        assert mask.logits is None
        assert int(mask.box_pixels.sum()) == int(mask.pixels.sum()) == mask.area
        num_bytes += mask.packed.bits.untyped_storage().nbytes()
        num_pixels += mask.box_pixels.numel()
    # a row has up to 14 unused bits
    assert num_pixels > 1e6
    assert num_bytes < 1.05 * num_pixels / 8
