"""MobileSAM with its real weights against facts of the original pipeline; and a plain automatic
generator.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelmill.core.errors import RequestError
from modelmill.models import sam
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import select_backends
from modelmill.vision.masks import encode_rle
from modelmill.vision.packed_mask import PackedMask
from modelmill.vision.prompts import (
    Prompt,
    group_prompts_by_shape,
    make_prompt,
    make_prompt_tensors,
)
from modelmill.vision.sam_model import Mask, SamModel
from tests.models.test_sam import make_model
from tests.vision.coco_rle import from_coco_rle


@pytest.fixture(scope="module")
def sam_model(shared: Path) -> SamModel:
    from safetensors.torch import load_file

    model = make_model(load_file(shared / "data/models/mobile_sam/mobile_sam.safetensors"))
    return SamModel(model, VisionContext(select_backends("cpu")), sam.IMAGE_MEAN, sam.IMAGE_STD)


def test_the_truck_window(sam_model: SamModel, shared: Path) -> None:
    # the facts are those of the original pipeline, as published beside the weights
    embedding = sam_model.embed_image(shared / "data/images/truck.jpg")
    assert embedding.size == (1800, 1200)
    best = sam_model.predict(embedding, make_prompt([(500, 375)]))[0]
    assert best.box == (424, 318, 627, 446)
    assert best.score == pytest.approx(0.9998, abs=5e-5)
    assert best.pixels.shape == (1200, 1800)
    single = sam_model.predict(embedding, make_prompt([(500, 375)]), multimask=False)
    assert len(single) == 1
    assert single[0].box == (233, 317, 629, 460)
    assert single[0].score == pytest.approx(0.8048, abs=5e-5)


def test_prompts_together_are_prompts_alone(sam_model: SamModel, shared: Path) -> None:
    embedding = sam_model.embed_image(shared / "data/images/truck.jpg")
    first = sam_model.predict(embedding, make_prompt([(500, 375)]))
    prompts = [
        make_prompt([(500, 375)]),
        make_prompt(box=(425, 600, 700, 875)),
        make_prompt([(575, 750)], [0], box=(425, 600, 700, 875)),
        make_prompt([(1000, 500)]),
        make_prompt([(500, 375)], mask=first[0].logits),
        make_prompt([(500, 375), (1125, 625)]),
    ]
    together = sam_model.predict_all(embedding, prompts)
    for prompt, masks in zip(prompts, together, strict=True):
        alone = sam_model.predict(embedding, prompt)
        assert [m.box for m in alone] == [m.box for m in masks]
        assert [m.score for m in alone] == pytest.approx([m.score for m in masks], abs=1e-5)
        assert [m.score for m in masks] == sorted((m.score for m in masks), reverse=True)


def test_a_cpu_decodes_many_prompts_a_few_at_a_time(
    sam_model: SamModel, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intermediate tensors of 64 prompts are 268 MB each, fresh pages of the system's for each
    operation.
    """
    embedding = sam_model.embed_image(shared / "data/images/truck.jpg")
    prompts = [make_prompt([(100.0 * i, 50.0 * i)]) for i in range(1, 12)]
    calls, decoded = [], sam_model._run_decoder
    monkeypatch.setattr(
        sam_model, "_run_decoder", lambda *inputs: calls.append(len(inputs[1])) or decoded(*inputs)
    )
    logits, scores = sam_model.decode(embedding, prompts)
    assert max(calls) <= 8
    assert sum(calls) == 11
    for i in (0, 7, 8, 10):
        alone, score = sam_model.decode(embedding, [prompts[i]])
        assert torch.allclose(alone[0], logits[i], atol=1e-3)
        assert torch.allclose(score[0], scores[i], atol=1e-5)


def test_a_picture_seen_before_is_not_computed_again(
    sam_model: SamModel, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = sam_model.embed_image(shared / "data/images/truck.jpg")
    monkeypatch.setattr(sam_model.model, "encode_image", None)
    assert torch.equal(
        sam_model.embed_image(shared / "data/images/truck.jpg").embedding, embedding.embedding
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"points": [(1, 2)], "labels": [1, 0]},
        {"points": [(1, 2)], "labels": [2]},
        {"points": [(1, float("nan"))]},
        {"points": [(1, 2, 3)]},
        {"points": [("a", 2)]},
        {"box": (1, 2, 3)},
        {"box": (5, 0, 1, 3)},
        {"points": [(1, 2)] * 300},
    ],
)
def test_wrong_prompts_are_one_line(wrong: dict) -> None:
    with pytest.raises(RequestError):
        make_prompt(**wrong)


def test_arrangement_of_points_and_boxes() -> None:
    prompts = [make_prompt([(10, 20)]), make_prompt(box=(1, 2, 3, 4)), make_prompt([(7, 8)])]
    assert group_prompts_by_shape(prompts) == [[0, 2], [1]]
    points, labels = make_prompt_tensors([prompts[0]], (100, 50), (1024, 512))
    assert points[0].tolist() == [[pytest.approx(102.4), pytest.approx(204.8)], [0, 0]]
    assert labels.tolist() == [[1, -1]]
    points, labels = make_prompt_tensors([prompts[1]], (100, 50), (200, 100))
    assert points[0].tolist() == [[2, 4], [6, 8]]
    assert labels.tolist() == [[2, 3]]
    nothing, none = make_prompt_tensors([Prompt(mask=torch.zeros(4, 4))], (10, 10), (10, 10))
    assert nothing.shape == (1, 0, 2)
    assert none.shape == (1, 0)


def test_masks_of_a_large_picture_are_kept_as_small_as_they_are() -> None:
    """A hundred whole masks of a 48-megapixel photo would take 4.8 GB as bools."""
    part = torch.tensor([[True, False], [True, True], [False, True]])
    mask = Mask(PackedMask.pack(part), (8000, 6000), 0.9, (10, 20, 11, 22), 4)
    pixels = mask.pixels
    assert pixels.shape == (6000, 8000)
    assert pixels.nonzero().tolist() == [[20, 10], [21, 10], [21, 11], [22, 11]]
    assert from_coco_rle(mask.to_dict(rle=True)["rle"]) == encode_rle(pixels)
