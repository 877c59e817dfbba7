"""The Segmenter: engines and checkpoints, images and prompts, and MobileSAM's facts through an
engine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

import modelmill
from modelmill.core.config import BuildConfig
from modelmill.core.errors import ArtifactError, RequestError, UsageError
from modelmill.llm import LLM, build_engine
from modelmill.segmenter import Segmenter
from modelmill.vision.masks import elementwise_mask_iou
from modelmill.vision.prompts import make_prompt
from tests.models.sam_seeded import small_file


def photo(seed: int = 0, size: tuple[int, int] = (200, 120)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    build_engine(small_file(folder), folder / "small.engine", BuildConfig(), check=False)
    return folder / "small.engine"


def test_set_once_and_predict_many(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert modelmill.Segmenter is Segmenter
    segmenter = Segmenter(engine, device="cpu")
    assert segmenter.set_image(photo()) == (200, 120)
    masks = segmenter.predict([(50, 60)], [1])
    assert len(masks) == 3
    assert [m.score for m in masks] == sorted((m.score for m in masks), reverse=True)
    assert masks[0].pixels.shape == (120, 200)
    # the embedding is kept by the image's content
    monkeypatch.setattr(segmenter.model.model, "encode_image", None)
    segmenter.set_image(PIL.Image.fromarray(photo()))
    assert [m.box for m in segmenter.predict([(50, 60)])] == [m.box for m in masks]
    assert len(segmenter.predict(box=(10, 10, 90, 90), multimask=False)) == 1
    assert len(segmenter.predict([(50, 60)], mask=masks[0].logits)) == 3


def test_a_rough_mask_in_any_of_its_forms(engine: Path, tmp_path: Path) -> None:
    segmenter = Segmenter(engine, device="cpu")
    segmenter.set_image(photo())
    first = segmenter.predict([(50, 60)])[0]
    assert first.logits is not None
    again = segmenter.predict(mask=first.logits)
    for logits in (first.logits.numpy(), first.logits[None], first.logits.double()):
        assert [m.box for m in segmenter.predict(mask=logits)] == [m.box for m in again]
    white = np.zeros((120, 200), bool)
    white[30:80, 40:150] = True
    PIL.Image.fromarray(white).save(tmp_path / "rough.png")
    drawn = segmenter.predict(mask=white)
    for rough_mask in (
        torch.from_numpy(white),
        white.astype(np.uint8) * 255,
        PIL.Image.fromarray(white),
        tmp_path / "rough.png",
        (tmp_path / "rough.png").read_bytes(),
    ):
        assert [m.score for m in segmenter.predict(mask=rough_mask)] == [m.score for m in drawn]
    side = segmenter.model.mask_size
    for wrong in (
        torch.zeros(7, 7),
        torch.full((side, side), float("nan")),
        5,
        b"no picture",
        tmp_path / "no.png",
    ):
        with pytest.raises(RequestError):
            segmenter.predict(mask=wrong)
    with pytest.raises(UsageError, match="set_image"):
        Segmenter(engine, device="cpu").predict(mask=first.logits)


def test_loose_values_are_one_line(engine: Path) -> None:
    """What people write by mistake: a pair for a list of pairs, one label for a list, a place
    beside the picture.
    """
    segmenter = Segmenter(engine, device="cpu")
    segmenter.set_image(photo())
    for wrong, says in (
        ({"points": (50, 60)}, "points are a list"), ({"points": 5}, "points are a list"),
        ({"points": [(50, 60)], "labels": 1}, "labels a list"), ({"box": 7}, "a box four numbers"),
        ({"points": [("a", 1)]}, "numbers"),
        ({"points": [(201, 5)]}, "the point 201,5 is outside " "the picture"),
        ({"box": (5, 5, 90, 121)}, "the box corner 90,121 is outside"),
        ({"points": None}, "needs a point"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=says) as caught:
            segmenter.predict(**wrong)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert segmenter.predict_all([]) == []
    with pytest.raises(UsageError, match="must be a list"):
        segmenter.embed_images("photo.jpg")
    for name, value in (("points_per_side", "x"), ("points_per_side", 2.5),
        ("points_per_side", True),
                        ("crop_n_layers", 1.0), ("pred_iou_thresh", None),
                        ("stability_score_offset", float("nan")),
                        ("points_per_side", 10**5000)):  # fmt: skip
        with pytest.raises(RequestError, match=name):
            segmenter.everything(photo(), **{name: value})


@pytest.mark.parametrize("size", [(1, 1), (1, 90), (90, 1), (2, 70)])
def test_pictures_too_thin_for_crops(engine: Path, size: tuple[int, int]) -> None:
    loose = {
        "points_per_side": 2,
        "pred_iou_thresh": 0.0,
        "stability_score_thresh": 0.0,
        "crop_n_layers": 2,
    }
    masks = Segmenter(engine, device="cpu").generate_masks(photo(0, size), **loose)
    assert all(mask.pixels.shape == size[::-1] for mask in masks)


def test_several_prompts_and_everything(engine: Path) -> None:
    segmenter = Segmenter(engine)
    embeddings = segmenter.embed_images([photo(0), photo(1, (90, 160))])
    assert [s.size for s in embeddings] == [(200, 120), (90, 160)]
    both = segmenter.predict_all(
        [make_prompt([(5, 5)]), make_prompt(box=(1, 1, 80, 80))], embedding=embeddings[1]
    )
    assert [len(masks) for masks in both] == [3, 3]
    loose = {
        "points_per_side": 2,
        "pred_iou_thresh": 0.0,
        "stability_score_thresh": 0.0,
        "box_nms_thresh": 1.0,
    }
    reports: list[tuple[str, int, int]] = []
    masks = segmenter.everything(photo(), progress=lambda *at: reports.append(at), **loose)
    assert reports == [("points", 0, 4), ("points", 4, 4)]
    assert all(m.stability is not None for m in masks)


def test_mistakes_are_one_line(engine: Path, tmp_path: Path) -> None:
    segmenter = Segmenter(engine)
    with pytest.raises(UsageError, match="set_image"):
        segmenter.predict([(1, 2)])
    segmenter.set_image(photo())
    with pytest.raises(RequestError, match="a point, a box or a mask"):
        segmenter.predict()
    with pytest.raises(UsageError, match=r"unknown option multi; did you mean multimask\?"):
        segmenter.predict(multi=False)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="unknown option colour"):
        segmenter.everything(photo(), colour=3)
    with pytest.raises(UsageError, match="dtype: decided when an engine is built"):
        Segmenter(engine, dtype="bfloat16")
    with pytest.raises(
        UsageError, match=r"segments images: modelmill segment .*small\.engine IMAGE"
    ):
        LLM(engine)
    with pytest.raises(UsageError, match="cpu, cuda"):
        Segmenter(engine, device="tpu")


def test_a_damaged_engine_is_refused(engine: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy.engine"
    shutil.copytree(engine, copy)
    weights = next((copy / "weights").iterdir())
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match="damaged"):
        Segmenter(copy)


def test_a_checkpoint_is_built_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "cache"))
    checkpoint = small_file(tmp_path)
    first = Segmenter(checkpoint, dtype="bfloat16")
    assert "building an engine" in capsys.readouterr().err
    assert first.manifest.build["dtype"] == "bfloat16"
    assert Segmenter(checkpoint, dtype="bfloat16").path == first.path
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match="segments images"):
        LLM(checkpoint)


@pytest.fixture(scope="module")
def mobile(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mobile")
    source = shared / "data/models/mobile_sam/mobile_sam.safetensors"
    engines = {"one": "float32", "two": "float32", "half": "bfloat16", "eight": "bfloat16-int8"}
    for name, dtype_and_recipe in engines.items():
        dtype, _, recipe = dtype_and_recipe.partition("-")
        build_engine(
            source,
            folder / name,
            BuildConfig(dtype=dtype, quantization=recipe or "none"),
            check=False,
        )
    return {name: folder / name for name in engines}


def test_mobilesam_engines_keep_the_facts(mobile: dict[str, Path], shared: Path) -> None:
    # the box and the score are those of the original pipeline, as published beside the weights
    one, two = Segmenter(mobile["one"], device="cpu"), Segmenter(mobile["two"], device="cpu")
    for name in ("truck.jpg", "dog.jpg"):
        embeddings = [
            s.embed_images([shared / "data/images" / name])[0].embedding for s in (one, two)
        ]
        assert torch.equal(*embeddings)
    one.set_image(shared / "data/images/truck.jpg")
    best = one.predict([(500, 375)])[0]
    assert best.box == (424, 318, 627, 446)
    assert best.score == pytest.approx(0.9998, abs=5e-5)
    half = Segmenter(mobile["half"], device="cpu")
    half.set_image(shared / "data/images/truck.jpg")
    assert half.predict([(500, 375)])[0].box == best.box
    eight = Segmenter(mobile["eight"], device="cpu")
    eight.set_image(shared / "data/images/truck.jpg")
    # nine points, some on the edge between two answers: the whole grid is the slow test
    assert overlap(one, half, 3, (1800, 1200))[0] >= 0.985
    assert overlap(one, eight, 3, (1800, 1200))[0] >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("which", "least"), [("half", 0.99), ("eight", 0.97)])
def test_masks_over_a_grid(mobile: dict[str, Path], shared: Path, which: str, least: float) -> None:
    one, other = Segmenter(mobile["one"], device="cpu"), Segmenter(mobile[which], device="cpu")
    for name, size in (("truck.jpg", (1800, 1200)), ("dog.jpg", (800, 534))):
        for segmenter in (one, other):
            segmenter.set_image(shared / "data/images" / name)
        mean, difference = overlap(one, other, 15, size)
        assert mean >= least, (name, mean)
        assert difference < 0.1


def overlap(
    one: Segmenter, other: Segmenter, side: int, size: tuple[int, int]
) -> tuple[float, float]:
    """Mean IoU of the best masks over side × side points (the first's choice of three), and the
    scores' distance.
    """
    ious, apart = [], []
    for y in range(side):
        prompts = [
            make_prompt([((x + 0.5) * size[0] / side, (y + 0.5) * size[1] / side)])
            for x in range(side)
        ]
        assert one._embedding is not None
        assert other._embedding is not None
        pairs = [s.model.decode(s._embedding, prompts) for s in (one, other)]
        best = pairs[0][1][:, 1:].argmax(-1) + 1
        rows = torch.arange(side)
        masks = [
            one.model.predict_all(one._embedding, prompts),
            other.model.predict_all(other._embedding, prompts),
        ]
        apart.append((pairs[0][1][rows, best] - pairs[1][1][rows, best]).abs())
        for i in range(side):
            matches = [m for m in masks[1][i] if torch.equal(m.logits, pairs[1][0][i, best[i]])]
            ious.append(float(elementwise_mask_iou(masks[0][i][0].pixels, matches[0].pixels)))
    return sum(ious) / len(ious), float(torch.cat(apart).max())


def test_a_picture_that_overflows_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_engine(
        small_file(tmp_path), tmp_path / "half.engine", BuildConfig(dtype="float16"), check=False
    )
    segmenter = Segmenter(tmp_path / "half.engine", device="cpu")
    encode = segmenter.model.model.encode_image
    monkeypatch.setattr(
        segmenter.model.model, "encode_image", lambda x, vision: encode(x, vision) * 1e5
    )
    with pytest.raises(RequestError, match=r"overflows the engine's float16.*--dtype bfloat16"):
        segmenter.set_image(photo())
    assert not len(segmenter.model.embedding_cache)


@pytest.mark.parametrize("recipe", ["int8", "fp8"])
def test_a_checkpoint_in_8_bits_through_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Path, recipe: str
) -> None:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "cache"))
    quantized, plain = (
        Segmenter(small_file(tmp_path), quantization=recipe, dtype="float32"),
        Segmenter(engine),
    )
    assert quantized.manifest.build["quantization"] == recipe
    for segmenter in (quantized, plain):
        segmenter.set_image(photo())
    actual, reference = quantized.predict([(50, 60)]), plain.predict([(50, 60)])
    assert float(elementwise_mask_iou(actual[0].pixels, reference[0].pixels)) > 0.7
    assert actual[0].score != reference[0].score


@pytest.mark.parametrize(
    "bad", [b"", b"text", b"\x89PNG\r\n\x1a\n", 7, "no.png", np.zeros((4, 4), np.float32)]
)
def test_bad_images_are_one_line(engine: Path, bad: object) -> None:
    segmenter = Segmenter(engine)
    with pytest.raises(RequestError) as caught:
        segmenter.set_image(bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [(1, 1), (1, 400), (400, 1)])
def test_thin_images(engine: Path, size: tuple[int, int]) -> None:
    segmenter = Segmenter(engine)
    segmenter.set_image(photo(0, size))
    assert segmenter.predict([(0, 0)])[0].pixels.shape == (size[1], size[0])
