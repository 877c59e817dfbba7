"""What ``make bench`` measures on devices of several sizes."""

from __future__ import annotations

import pytest

from benchmarks.model_shapes import SHAPES, shape_cost
from benchmarks.suite_plan import GIB, needed_bytes, plan_gpu, plan_works, works_for_gpu

SHARE = 0.45


@pytest.mark.parametrize(
    ("gib", "shapes"),
    [
        (8, []),  # a laptop: a side has 3.6 GiB
        (10, ["qwen2.5-0.5b"]),
        (24, ["qwen2.5-0.5b", "qwen2.5-1.5b"]),
        (80, ["qwen2.5-0.5b", "llama-3-8b"]),
        (141, ["qwen2.5-0.5b", "llama-3-8b"]),
    ],
)
def test_the_smallest_and_the_largest_that_fit(gib: int, shapes: list[str]) -> None:
    plans, _ = plan_gpu(gib * GIB, SHARE)
    assert [plan.shape for plan in plans] == shapes


@pytest.mark.parametrize("gib", [4, 10, 24, 40, 80])
def test_every_planned_work_fits_and_every_other_is_told(gib: int) -> None:
    plans, skipped = plan_gpu(gib * GIB, SHARE, list(SHAPES))
    names = {each.name for each in skipped}
    planned = {plan.shape: {work.name for work in plan.works} for plan in plans}
    for shape in SHAPES:
        cost = shape_cost(SHAPES[shape])
        for work in works_for_gpu():
            fits = needed_bytes(cost, work) <= gib * GIB * SHARE
            assert (work.name in planned.get(shape, ())) == fits
            assert fits or f"{shape} {work.name}" in names or shape in names
    assert all("GiB" in each.reason for each in skipped)


def test_large_batches_are_left_out_one_by_one() -> None:
    plan, skipped = plan_works("qwen-7b", 23 * GIB)
    assert plan is not None
    assert max(len(work.prompts) for work in plan.works) == 8
    assert {each.name for each in skipped} == {
        "qwen-7b decode-32x1024",
        "qwen-7b decode-64x1024",
        "qwen-7b decode-256x128",
        "qwen-7b decode-64x128",
    }


def test_works_by_name() -> None:
    [plan], skipped = plan_gpu(80 * GIB, SHARE, ["llama-3-8b"], ["first-512", "decode-1x128"])
    assert [work.name for work in plan.works] == ["decode-1x128", "first-512"]
    assert skipped == []
