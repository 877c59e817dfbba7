"""Calibration with pictures: their embeddings reach the layers, lines that are no good are
named.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from modelmill.artifact.store import open_artifact
from modelmill.builder import build_engine
from modelmill.builder.calibration_data import CalibrationSource, read_calibration_texts
from modelmill.builder.layer_quantizer import LayerQuantizer
from modelmill.builder.multimodal_calibration import (
    CalibrationSample,
    draw_synthetic_image,
    load_multimodal_samples,
    with_images_digest,
)
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.ops.registry import select_backends
from modelmill.vision.image_input import load_image_stretched_to_square
from tests.models.minigpt4_seeded import QFORMER, VISION_ENCODER, write_checkpoint

SMALL: dict[str, Any] = {
    "target": "cpu", "dtype": "float32", "quantization": "int4", "group_size": 32,
    "calibration_samples": 8,
    "calibration_length": 120,
}  # fmt: skip
SIDE, PLACES = VISION_ENCODER["image"], QFORMER["queries"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("shown") / "files", shared)


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, bytes]:
    return open_checkpoint(folder).tokenizer_files()


def save(path: Path, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 50, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(path)
    return path


def url(path: Path) -> str:
    buffer = io.BytesIO()
    PIL.Image.open(path).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def write_jsonl(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def source_of(path: Path | None, length: int = 120, samples: int = 50) -> CalibrationSource:
    return CalibrationSource(path, "", samples, length)


def test_lines_of_every_kind(tmp_path: Path, files: dict[str, bytes]) -> None:
    photo = save(tmp_path / "photo.png")
    (tmp_path / "more").mkdir()
    save(tmp_path / "more" / "other.png", 1)
    answer = {"role": "assistant", "content": "A cat."}
    path = write_jsonl(
        tmp_path / "lines.jsonl",
        {"image": "photo.png", "text": "What is it?", "answer": "A dog in the snow."},
        {"image": "photo.png", "caption": "A dog."},
        {"images": ["photo.png", "more/other.png"], "text": "Which is larger?"},
        {"text": "Words alone."},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "more/other.png"}]},
                answer,
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": url(photo)}}],
                }
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "No picture."},
                {"role": "assistant", "content": "No."},
            ]
        },
    )
    samples = load_multimodal_samples(source_of(path, 400), files, SIDE)
    assert [len(sample.images) for sample in samples] == [1, 1, 2, 1, 1, 0]
    photo_pixels, _ = load_image_stretched_to_square(photo, SIDE)
    other, _ = load_image_stretched_to_square(tmp_path / "more" / "other.png", SIDE)
    for number, expected in (
        (0, [photo_pixels]),
        (1, [photo_pixels]),
        (2, [photo_pixels, other]),
        (3, [other]),
        (4, [photo_pixels]),
    ):
        pictures = list(samples[number].images.values())
        assert all(np.array_equal(a, b) for a, b in zip(pictures, expected, strict=True))
        for at in samples[number].images:
            assert samples[number].ids[at : at + PLACES] == [0] * PLACES
    # both lines of words alone
    assert samples[-1].images == {}
    assert len(samples[-1].ids) > 8


def test_no_sequence_ends_inside_a_picture(tmp_path: Path, files: dict[str, bytes]) -> None:
    save(tmp_path / "a.png")
    path = write_jsonl(
        tmp_path / "l.jsonl",
        {"images": ["a.png"] * 4, "text": "word " * 30, "answer": "word " * 30},
    )
    [sample] = load_multimodal_samples(source_of(path, 1000), files, SIDE)
    places = sorted(sample.images)
    ends = range(places[0] + PLACES, len(sample.ids) + 2)
    for length in (
        n
        for n in ends
        if n % 16 == 0 or n >= ends[-2] or any(0 <= n - at <= PLACES + 1 for at in places)
    ):
        [cut] = load_multimodal_samples(source_of(path, length), files, SIDE)
        assert len(cut.ids) <= length
        assert cut.ids == sample.ids[: len(cut.ids)]
        assert sorted(cut.images) == [at for at in places if at + PLACES <= len(cut.ids)]
        assert not any(at < len(cut.ids) < at + PLACES for at in places)
    with pytest.raises(
        UsageError, match=r"line 1: an image takes 8 tokens .* raise --calibration-length"
    ):
        load_multimodal_samples(source_of(path, places[0] + PLACES - 1), files, SIDE)


def test_our_own_pictures_are_the_same_every_time(files: dict[str, bytes]) -> None:
    samples = load_multimodal_samples(source_of(None, 200, 12), files, SIDE)
    again = load_multimodal_samples(source_of(None, 200, 12), files, SIDE)
    assert len(samples) == 12
    assert [s.ids for s in samples] == [s.ids for s in again]
    shown = [p for s in samples for p in s.images.values()]
    assert 3 <= sum(bool(s.images) for s in samples) <= 10
    assert all(
        np.array_equal(a, b)
        for a, b in zip(shown, (p for s in again for p in s.images.values()), strict=True)
    )
    assert not np.array_equal(shown[0], shown[1])
    assert draw_synthetic_image(3, 40).shape == (40, 40, 3)
    assert all(draw_synthetic_image(seed, 24).std() > 5 for seed in range(40)), (
        "none is of one colour"
    )


BAD: list[tuple[Any, str]] = [
    ({"image": "gone.png", "text": "What?"}, r"line 2: .*gone.png: there is no such file"),
    ({"image": "words.png", "text": "What?"}, r"line 2: .*words.png cannot be read as an image"),
    ({"image": "half.png", "text": "What?"}, r"line 2: .*half.png is a broken image"),
    ({"image": "ok.png"}, r"line 2: has an image and no text"),
    ({"image": "ok.png", "text": "  "}, r"line 2: has an image and no text"),
    ({"image": 5, "text": "What?"}, r"line 2: image must be a path"),
    ({"images": ["ok.png", ""], "text": "What?"}, r"line 2: image must be a path"),
    ({"text": "  "}, r"line 2: is empty"),
    ({}, r"line 2: has no text under text"),
    ({"image": ".", "text": "What?"}, r"line 2: .*(is a directory|Is a directory)"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
                }
            ]
        },
        r"line 2: .*addresses are not fetched",
    ),
    (
        {"messages": [{"role": "tool", "content": [{"type": "image", "image": "ok.png"}]}]},
        r"line 2: messages\[0\]",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "ok.png"}]},
                "A dog.",
            ]
        },
        "line 2: messages",
    ),
    ({"image": "a\0b", "text": "What?"}, r"line 2: .*is not a valid path"),
    ({"image": "\ud800.png", "text": "What?"}, r"line 2: .*is not a valid path"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "\ud800"}}]}
            ]
        },
        r"line 2: .*addresses are not fetched",
    ),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_lines_that_are_no_good_are_named(
    tmp_path: Path, files: dict[str, bytes], folder: Path, line: Any, message: str
) -> None:
    save(tmp_path / "ok.png")
    (tmp_path / "words.png").write_text("no picture")
    (tmp_path / "half.png").write_bytes((tmp_path / "ok.png").read_bytes()[:200])
    path = write_jsonl(tmp_path / "bad.jsonl", {"text": "A good line."}, line)
    config = BuildConfig(**SMALL | {"calibration": str(path)})
    with pytest.raises(UsageError, match=message) as caught:
        LayerQuantizer(make_build_plan(open_checkpoint(folder), config), None)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_another_picture_under_the_same_name_is_another_source(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    path = write_jsonl(tmp_path / "l.jsonl", {"image": "a.png", "text": "What?"})
    first = with_images_digest(source_of(path))
    assert first == with_images_digest(source_of(path))
    save(tmp_path / "a.png", 1)
    assert with_images_digest(source_of(path)).image_digest != first.image_digest
    assert (
        with_images_digest(
            source_of(write_jsonl(tmp_path / "t.jsonl", {"text": "Words."}))
        ).image_digest
        == ""
    )


def test_a_model_without_a_vision_encoder_says_so(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "l.jsonl", {"text": "Fine."}, {"image": "a.png", "text": "What?"})
    with pytest.raises(UsageError, match="line 2: has an image, which this model does not support"):
        list(read_calibration_texts(path))


@torch.inference_mode()
def test_embeddings_enter_the_first_layer(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    save(tmp_path / "b.png", 2)
    path = write_jsonl(
        tmp_path / "l.jsonl",
        {"text": "word " * 150},
        {"images": ["a.png", "b.png"], "text": "Compare.", "answer": "word " * 40},
    )
    plan = make_build_plan(
        open_checkpoint(folder), BuildConfig(**SMALL | {"calibration": str(path)})
    )
    layers = LayerQuantizer(plan, None)  # type: ignore[arg-type]
    has_images = [bool(sample.images) for sample in layers.samples]
    assert has_images.count(True) == 1
    flow = layers.calibration_state
    engine = tmp_path / "plain.engine"
    build_engine.build(
        make_build_plan(open_checkpoint(folder), BuildConfig(dtype="float32", target="cpu")),
        engine,
        None,
    )
    from modelmill.loader.model_loader import load_model

    model: Any = load_model(open_artifact(engine), "cpu")
    x = torch.cat([batch.x for batch in flow.batches])
    first = sum(len(sample.ids) for sample in layers.samples[: has_images.index(True)])
    sample: CalibrationSample = layers.samples[has_images.index(True)]
    for at, picture in sample.images.items():
        expected = model.encode_images(
            torch.as_tensor(picture).permute(2, 0, 1)[None], select_backends("cpu")
        )[0]
        actual = x[first + at : first + at + PLACES]
        assert (actual - expected).norm() <= 1e-5 * expected.norm()
    last = first + max(sample.images) + PLACES
    assert torch.equal(x[last], model.embed.weight[sample.ids[max(sample.images) + PLACES]])


@pytest.mark.parametrize("options", [{}, {"quantization": "smoothquant", "alpha": "0.5"}], ids=str)
def test_a_build_with_pictures_is_the_same_twice_and_reported(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    digests = set()
    for name in ("a", "b"):
        plan = make_build_plan(open_checkpoint(folder), BuildConfig(**SMALL | options))
        build_engine.build(plan, tmp_path / name, None)
        artifact = open_artifact(tmp_path / name)
        digests.add(artifact.manifest.digest())
        assert artifact.manifest.source["calibration"]["pictures"] == "drawn"
    assert len(digests) == 1
    weight_formats = artifact.manifest.weight_formats
    assert {
        weight_formats[name] for name in weight_formats if name.startswith("image_embedder.")
    } == {"dense"}
    assert {weight_formats[name] for name in weight_formats if name.startswith("layers.")} != {
        "dense"
    }


def test_auto_looks_at_pictures_too(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    lines = [
        {"image": "a.png", "text": "What is it?", "answer": "word " * 90},
        {"text": "word " * 200},
    ]
    path = write_jsonl(tmp_path / "l.jsonl", *lines)
    options: dict[str, Any] = {
        "quantization": "auto",
        "max_kl": 0.05,
        "calibration": str(path),
        "dtype": "float32",
        "target": "cpu",
    }
    plan = make_build_plan(open_checkpoint(folder), BuildConfig(**options))
    assert plan.auto_result is not None
    assert plan.auto_result.measured.kl <= 0.05
    assert set(plan.config.layer_recipes) == {"0", "1", "2"}
    save(tmp_path / "a.png", 5)
    other = make_build_plan(open_checkpoint(folder), BuildConfig(**options)).auto_result
    assert other is not None
    assert other.measured.kl != plan.auto_result.measured.kl, "another picture makes other inputs"
