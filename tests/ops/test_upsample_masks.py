"""Upsampled masks: the reference by hand, and the C++ implementation against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.ops.cpu.vision import upsample_masks as fast
from modelmill.ops.upsample_masks import (
    UpsampleMasksInputs,
    masks_to_boxes,
    upsample_logits,
    upsample_masks,
)

SIDES = st.integers(1, 12)
GRIDS = st.tuples(SIDES, SIDES).flatmap(
    lambda s: st.lists(st.booleans(), min_size=s[0] * s[1], max_size=s[0] * s[1]).map(
        lambda bits: torch.tensor(bits).view(s)
    )
)


@settings(deadline=None, max_examples=100)
@given(GRIDS)
def test_boxes(mask: torch.Tensor) -> None:
    box = masks_to_boxes(mask[None])[0].tolist()
    ys, xs = np.nonzero(mask.numpy())
    assert box == ([xs.min(), ys.min(), xs.max(), ys.max()] if len(xs) else [0, 0, 0, 0])


def test_enlarging_crops_before_the_second_step() -> None:
    logits = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    upsampled = upsample_logits(logits, 32, (32, 20), (50, 31))
    assert upsampled.shape == (1, 2, 31, 50)
    first = torch.nn.functional.interpolate(logits, (32, 32), mode="bilinear")[..., :20, :]
    assert torch.equal(upsampled, torch.nn.functional.interpolate(first, (31, 50), mode="bilinear"))


def test_stability_is_the_overlap_of_a_higher_and_a_lower_cut() -> None:
    logits = torch.tensor([[[-2.0, -0.5, 0.5, 2.0]] * 4])
    masks, boxes, areas, steady = upsample_masks(
        UpsampleMasksInputs(logits, 4, (4, 4), (4, 4), 1.0)
    )
    assert masks is not None
    assert steady is not None
    assert (boxes.tolist(), areas.tolist(), steady.tolist()) == (
        [[2, 0, 3, 3]],
        [8],
        [pytest.approx(4 / 12)],
    )


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 1000), st.integers(1, 4), st.sampled_from([4, 16]), st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 150), st.integers(1, 150), st.sampled_from([None, 0.5, 2.0]),
    st.sampled_from([-20.0, -3.0, 0, 20]),
)  # fmt: skip
def test_compiled_masks_are_torchs(
    seed: int,
    count: int,
    side: int,
    wide: int,
    tall: int,
    width: int,
    height: int,
    offset: float | None,
    shift: float,
) -> None:
    if fast.unavailable_reason("cpu") is not None:
        pytest.skip("needs a C++ compiler: apt-get install g++")
    logits = (
        torch.randn(count, side, side, generator=torch.Generator().manual_seed(seed)) * 4 + shift
    )
    args = 64, (wide, tall), (width, height), offset
    expected = [upsample_masks(UpsampleMasksInputs(each[None], *args)) for each in logits]
    actual = fast.run(UpsampleMasksInputs(logits, *args))
    big = upsample_logits(logits[:, None], 64, (wide, tall), (width, height))[:, 0]
    clear = big.abs() > 1e-5  # machines without a fused multiply-add round otherwise
    for i, (masks, boxes, areas, steady) in enumerate(expected):
        assert masks is not None
        assert actual[0] is not None
        assert not ((actual[0][i] ^ masks[0]) & clear[i]).any()
        if clear[i].all():
            assert torch.equal(actual[1][i], boxes[0])
            assert int(actual[2][i]) == int(areas)
            assert offset is None or float(actual[3][i]) == pytest.approx(float(steady), abs=0.02)  # type: ignore[index, arg-type]
    nothing = fast.run(UpsampleMasksInputs(logits, *args, pixels=False))
    assert nothing[0] is None
    assert torch.equal(nothing[1], actual[1])


def test_no_masks_and_no_numbers() -> None:
    empty = fast.run(UpsampleMasksInputs(torch.zeros(0, 4, 4), 16, (16, 9), (30, 20), 1.0))
    assert [x.shape for x in empty if x is not None] == [(0, 20, 30), (0, 4), (0,), (0,)]
    broken = torch.full((1, 4, 4), float("nan"))
    assert int(fast.run(UpsampleMasksInputs(broken, 16, (16, 16), (8, 8)))[2]) == 0
