"""Masks as values, against plain loops written here and formats as published."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modelmill.ops.upsample_masks import masks_to_boxes
from modelmill.vision import masks
from tests.hypothesis_examples import examples
from tests.vision.coco_rle import decode_rle, from_coco_rle

GRIDS = st.integers(1, 9).flatmap(
    lambda h: st.integers(1, 9).flatmap(
        lambda w: st.lists(st.booleans(), min_size=h * w, max_size=h * w).map(
            lambda v: torch.tensor(v).view(h, w)
        )
    )
)


@settings(deadline=None, max_examples=examples(150, 40))
@given(GRIDS)
def test_run_lengths_there_and_back(mask: torch.Tensor) -> None:
    height, width = mask.shape
    runs = masks.encode_rle(mask)
    x0, y0, x1, y1 = masks_to_boxes(mask).tolist()
    assert masks.encode_rle(mask[y0 : y1 + 1, x0 : x1 + 1], (x0, y0), (height, width)) == runs
    # by the definition: column by column, alternating, beginning with the background
    expected, current, count = [], False, 0
    for value in mask.t().flatten().tolist():
        if value == current:
            count += 1
        else:
            expected.append(count)
            current, count = value, 1
    expected.append(count)
    assert runs == expected
    assert torch.equal(decode_rle(runs, height, width), mask)
    packed = masks.to_coco_rle(runs, height, width)
    assert packed["size"] == [height, width]
    assert from_coco_rle(packed) == runs


def test_compressed_runs_as_pycocotools_writes_them() -> None:
    # worked by hand from the format: 6 → '6', then 1, 40 = 8 + 32·1, and differences to the run
    # before the last
    assert masks.to_coco_rle([6, 1, 40], 1, 47)["counts"] == "61X1"
    assert masks.to_coco_rle([5, 3, 2, 1], 1, 11)["counts"] == "532N"
    assert masks.to_coco_rle([0, 4], 2, 2)["counts"] == "04"


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=12))
def test_runs_of_any_size_are_packed_five_bits_at_a_time(runs: list[int]) -> None:
    text = []
    for i, run in enumerate(runs):
        left = run - runs[i - 2] if i > 2 else run
        more = True
        while more:
            low, left = left & 31, left >> 5
            more = left != (-1 if low & 16 else 0)
            text.append(chr(48 + (low | 32 if more else low)))
    packed = masks.to_coco_rle(runs, 1, sum(runs))
    assert packed["counts"] == "".join(text)
    assert from_coco_rle(packed) == runs


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(*[st.integers(0, 30)] * 4, st.integers(0, 5)), min_size=1, max_size=25),
    st.sampled_from([0.3, 0.5, 0.7]),
)
@example([(0, 23, 20, 14, 0), (0, 25, 27, 30, 0)], 0.3)  # 273 / 910
def test_suppression_is_the_greedy_rule(raw: list[tuple[int, ...]], threshold: float) -> None:
    boxes = torch.tensor([[x, y, x + w + 1, y + h + 1] for x, y, w, h, _ in raw]).float()
    scores = torch.tensor([float(s) for *_, s in raw])
    expected: list[int] = []
    for i in sorted(range(len(raw)), key=lambda i: (-raw[i][4], i)):
        if all(_iou(boxes[i].tolist(), boxes[j].tolist()) <= threshold for j in expected):
            expected.append(i)
    assert masks.nms(boxes, scores, threshold).tolist() == expected


def _iou(a: list[float], b: list[float]) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    # in float32, as the boxes are: a threshold is sometimes met exactly
    common = np.float32(width * height)
    area = np.float32((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]))
    return float(common / (area - common))


def test_iou() -> None:
    a, b = torch.tensor([[True, True, False]]), torch.tensor([[False, True, True]])
    assert masks.elementwise_mask_iou(a, b) == pytest.approx(1 / 3)
    assert masks.elementwise_mask_iou(a & ~a, b & ~b) == 1
