"""``modelmill segment``: what it tells and writes, and each mistake in one line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from modelmill.cli.main import run_command_line
from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine
from modelmill.models import sam
from modelmill.nn.vision_context import VisionContext
from modelmill.progress_display import LogProgress
from tests.models.sam_seeded import small_file
from tests.vision.coco_rle import decode_rle, from_coco_rle


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    build_engine(small_file(folder), folder / "small.engine", BuildConfig(), check=False)
    return folder / "small.engine"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (60, 80 + i, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{i}.png")
    (folder / "notes.txt").write_text("no picture")
    return folder


def run_segment(*words: object) -> int:
    return run_command_line(["segment", *map(str, words)])


def test_json_overlay_masks_and_run_lengths(
    engine: Path, photos: Path, tmp_path: Path, capsys
) -> None:
    out, masks = tmp_path / "out.png", tmp_path / "masks"
    points = ("--point", "40,30", "--point", "1,1", "--label", "1,0")
    code = run_segment(
        engine, photos / "0.png", *points, "-o", out, "--masks", masks, "--json", "--rle"
    )
    assert code == 0
    output = json.loads(capsys.readouterr().out)
    assert output["size"] == [80, 60]
    assert len(output["masks"]) == 3
    scores = [m["score"] for m in output["masks"]]
    assert scores == sorted(scores, reverse=True)
    for mask in output["masks"]:
        shown = torch.from_numpy(np.array(PIL.Image.open(mask["file"])))
        assert torch.equal(decode_rle(from_coco_rle(mask["rle"]), *mask["rle"]["size"]), shown)
        assert int(shown.sum()) == mask["area"]
    assert PIL.Image.open(out).size == (80, 60)
    assert run_segment(engine, photos / "0.png", "--point", "40,30", "--masks", masks) == 0
    stdout = capsys.readouterr().out.splitlines()
    assert f"masks: {masks / '0-1.png'} … {masks / '0-3.png'}" in stdout
    assert (
        run_segment(engine, photos / "0.png", "--point", "40,30", "--masks", masks, "--single") == 0
    )
    assert f"masks: {masks / '0-1.png'}" in capsys.readouterr().out.splitlines()


def test_folders_and_globs_in_batches(engine: Path, photos: Path, tmp_path: Path, capsys) -> None:
    code = run_segment(
        engine,
        photos,
        f"{photos}/*.png",
        "--box",
        "5,5,70,50",
        "--batch",
        "2",
        "-o",
        tmp_path / "o",
        "--json",
    )
    assert code == 0
    output = json.loads(capsys.readouterr().out)["images"]
    assert [Path(each["image"]).name for each in output] == ["0.png", "1.png", "2.png"]
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == ["0.png", "1.png", "2.png"]
    alone = []
    for i in range(3):
        run_segment(engine, photos / f"{i}.png", "--box", "5,5,70,50", "--json")
        alone.append(json.loads(capsys.readouterr().out)["masks"])
    assert [[m["box"] for m in each["masks"]] for each in output] == [
        [m["box"] for m in masks] for masks in alone
    ]


def drawn_mask() -> PIL.Image.Image:
    mask = PIL.Image.new("L", (80, 60))
    mask.paste(255, (20, 10, 60, 50))
    return mask


def test_a_mask_as_prompt_and_everything(
    engine: Path, photos: Path, tmp_path: Path, capsys
) -> None:
    drawn_mask().save(tmp_path / "rough.png")
    assert (
        run_segment(
            engine, photos / "0.png", "--mask", tmp_path / "rough.png", "--single", "--json"
        )
        == 0
    )
    assert len(json.loads(capsys.readouterr().out)["masks"]) == 1
    assert (
        run_segment(engine, photos / "0.png", "--everything", "--points-per-side", "2", "--json")
        == 0
    )
    assert isinstance(json.loads(capsys.readouterr().out)["masks"], list)


def test_everything_reports_progress_without_a_terminal(
    engine: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    updates: list[tuple[str, float, float]] = []
    monkeypatch.setattr(LogProgress, "update", lambda _, *update: updates.append(update))
    assert run_segment(engine, photos / "0.png", "--everything", "--points-per-side", "2") == 0
    assert {("points", 0, 4), ("points", 4, 4)} <= set(updates)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is no prompt: give --point"),
        (["--point", "1"], "--point takes X,Y"),
        (["--point", "a,b"], "--point takes X,Y"),
        (["--point", "nan,1"], "finite"),
        (["--point", "900,1"], "outside the picture of 80 × 60"),
        (["--box", "1,2,3"], "--box takes X0,Y0,X1,Y1"),
        (["--box", "50,2,3,9"], "x0 <= x1"),
        (["--point", "1,1", "--label", "7"], "label is 1"),
        (["--point", "1,1", "--label", "1,0"], "1 points have 2 labels"),
        (["--label", "1", "--box", "1,1,2,2"], "--label belongs to a --point"),
        (["--everything", "--point", "1,1"], "--everything takes no"),
        (["--everything", "--points-per-side", "0"], "points_per_side"),
        (["--point", "1,1", "-o", "out.what"], "cannot write the picture format"),
        (["--point", "1,1", "-o", "out.psd"], "cannot write the picture format"),
        (["--point", "1,1", "--rle"], "add --json"),
        (["--everything", "--rle"], "add --json"),
        (["--point", "1,1", "--points-per-side", "8"], "--points-per-side belongs to --everything"),
        (["--box", "1,1,5,5", "--min-region", "8"], "--min-region belongs to --everything"),
        (["--everything", "--stability-score-thresh", "7"], "stability_score_thresh"),
        (
            ["--box", "1,1,5,5", "--box", "2,2,6,6", "--point", "1,1"],
            "each of several boxes is a prompt of its own",
        ),
        (["--box", "1,1,5,5", "--masks", __file__], "name a folder for the masks"),
        (["--point", "1,1", "--mask", "no.png"], "no.png: there is no such file"),
        (["--point", "1,1", "--batch", "0"], "--batch must be between 1 and 64, not 0"),
    ],
)
def test_mistakes(engine: Path, photos: Path, words: list[str], says: str, capsys) -> None:
    assert run_segment(engine, photos / "0.png", *words) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_missing_picture_is_told_before_the_engine_is_opened(tmp_path: Path, capsys) -> None:
    assert run_segment(tmp_path / "none.engine", "nope.jpg", "--point", "1,1") == 2
    expected = "modelmill: nope.jpg: there is no such file; give the path of a picture\n"
    assert capsys.readouterr().err == expected


def test_nothing_is_written_over_a_picture(
    engine: Path, photos: Path, tmp_path: Path, capsys
) -> None:
    """A file that is read is never a file that is written, and pictures of one name do not hide
    each other.
    """
    one, before = photos / "0.png", (photos / "0.png").read_bytes()
    assert run_segment(engine, one, "--point", "1,1", "-o", photos / "." / "0.png") == 2
    err = capsys.readouterr().err
    assert "is an input picture" in err
    assert err.count("\n") == 1
    assert one.read_bytes() == before
    out = tmp_path / "seg" / "0-1.png"
    assert (
        run_segment(engine, one, "--point", "1,1", "-o", out, "--masks", out.parent, "--json") == 0
    )
    output = json.loads(capsys.readouterr().out)
    files = [output["overlay"], *(mask["file"] for mask in output["masks"])]
    assert len(set(files)) == len(files) == 4, "a mask is not written over its own overlay"
    assert all(Path(file).is_file() for file in files)
    (tmp_path / "more").mkdir()
    for twin in (photos / "0.bmp", tmp_path / "more" / "0.png"):
        PIL.Image.open(one).save(twin)
    inputs = [one, photos / "0.bmp", tmp_path / "more" / "0.png"]
    assert (
        run_segment(engine, *inputs, "--point", "1,1", "-o", photos, "--masks", photos, "--json")
        == 0
    )
    output = json.loads(capsys.readouterr().out)["images"]
    files = [each["overlay"] for each in output] + [
        mask["file"] for each in output for mask in each["masks"]
    ]
    assert len(set(files)) == len(files) == 3 * 4
    assert all(Path(file).is_file() for file in files)
    assert not set(files) & set(map(str, inputs))
    assert one.read_bytes() == before


def test_several_boxes_are_several_prompts(
    engine: Path, photos: Path, tmp_path: Path, capsys
) -> None:
    boxes = ["5,5,70,50", "10,1,20,9"]
    words = [word for box in boxes for word in ("--box", box)]
    assert (
        run_segment(engine, photos / "0.png", *words, "--json", "--rle", "-o", tmp_path / "o.png")
        == 0
    )
    together = json.loads(capsys.readouterr().out)["masks"]
    assert [mask.pop("prompt") for mask in together] == [0, 0, 0, 1, 1, 1]
    alone = []
    for box in boxes:
        assert run_segment(engine, photos / "0.png", "--box", box, "--json", "--rle") == 0
        alone += json.loads(capsys.readouterr().out)["masks"]
    assert [m["rle"] for m in together] == [m["rle"] for m in alone]
    assert [m["score"] for m in together] == pytest.approx([m["score"] for m in alone], rel=1e-5)
    assert run_segment(engine, photos / "0.png", *words, "--single") == 0
    assert "of box" in capsys.readouterr().out


def test_what_is_clear_in_a_drawn_mask_is_no_object(
    engine: Path, photos: Path, tmp_path: Path, capsys
) -> None:
    drawn = drawn_mask()
    drawn.save(tmp_path / "black.png")
    clear = PIL.Image.new("RGBA", (80, 60), (255, 255, 255, 0))
    clear.putalpha(drawn)
    clear.save(tmp_path / "clear.png")
    masks_of_runs = []
    for name in ("black.png", "clear.png"):
        assert (
            run_segment(engine, photos / "0.png", "--mask", tmp_path / name, "--json", "--rle") == 0
        )
        masks_of_runs.append(json.loads(capsys.readouterr().out)["masks"])
    assert masks_of_runs[0] == masks_of_runs[1]


def test_thresholds_of_everything(engine: Path, photos: Path, capsys) -> None:
    words = ["--everything", "--points-per-side", "4", "--json"]
    counts = []
    for iou, stable, nms in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 0)):
        limits = [
            "--pred-iou-thresh",
            iou,
            "--stability-score-thresh",
            stable,
            "--box-nms-thresh",
            nms,
        ]
        assert run_segment(engine, photos / "0.png", *words, *limits) == 0
        counts.append(len(json.loads(capsys.readouterr().out)["masks"]))
    assert counts[0] > max(counts[1:])


def _saved(picture: PIL.Image.Image, file_format: str, **options) -> bytes:
    out = io.BytesIO()
    picture.save(out, file_format, **options)
    return out.getvalue()


GOOD = {
    "one.png": _saved(PIL.Image.new("RGB", (1, 1)), "PNG"),
    "line.png": _saved(PIL.Image.new("RGB", (1, 300)), "PNG"),
    "cmyk.jpg": _saved(PIL.Image.new("CMYK", (9, 9)), "JPEG"),
    "deep.png": _saved(PIL.Image.fromarray(np.full((9, 9), 999, np.uint16)), "PNG"),
    "palette.png": _saved(PIL.Image.new("P", (9, 9)), "PNG"),
    "moving.gif": _saved(
        PIL.Image.new("RGB", (9, 9)),
        "GIF",
        save_all=True,
        append_images=[PIL.Image.new("L", (9, 9))],
    ),
}
BAD = {"empty.png": b"", "text.png": b"hello", "cut.png": GOOD["deep.png"][:40]}


@pytest.mark.parametrize("name", GOOD)
def test_odd_pictures_are_segmented(engine: Path, tmp_path: Path, name: str, capsys) -> None:
    (tmp_path / name).write_bytes(GOOD[name])
    assert (
        run_segment(engine, tmp_path / name, "--point", "0,0", "--json", "-o", tmp_path / "out.png")
        == 0
    )
    assert len(json.loads(capsys.readouterr().out)["masks"]) == 3


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_one_line(
    engine: Path, photos: Path, tmp_path: Path, name: str, capsys
) -> None:
    (tmp_path / name).write_bytes(BAD[name])
    assert run_segment(engine, tmp_path / name, "--point", "0,0", "--json") == 2
    captured = capsys.readouterr()
    assert name in captured.err
    assert captured.err.count("\n") == 1
    # among others it is reported, and the others are answered
    assert run_segment(engine, photos / "0.png", tmp_path / name, "--point", "0,0", "--json") == 1
    output = json.loads(capsys.readouterr().out)["images"]
    assert len(output[0]["masks"]) == 3
    assert name in output[1]["error"]


@pytest.mark.parametrize("verb", [["run", "--prompt", "x"], ["chat"], ["bench"]])
def test_other_verbs_refuse_in_one_line(engine: Path, verb: list[str], capsys) -> None:
    assert (
        run_command_line(
            [*verb[:1], *(["latency"] if verb[0] == "bench" else []), str(engine), *verb[1:]]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert f"segments images: modelmill segment {engine} IMAGE" in err
    assert err.count("\n") == 1


def test_inspect_and_build_show_it(engine: Path, tmp_path: Path, capsys) -> None:
    assert run_command_line(["inspect", str(engine)]) == 0
    assert "ViT, 2 × 48" in capsys.readouterr().out
    source = small_file(tmp_path)
    assert run_command_line(["inspect", str(source)]) == 0
    assert run_command_line(["build", str(source), "-o", str(tmp_path / "new.engine")]) == 0
    out = capsys.readouterr().out
    assert "IoU with the reference" in out
    assert "modelmill segment" in out
    assert run_command_line(["inspect", str(tmp_path / "new.engine")]) == 0
    assert "rounding differences only" in capsys.readouterr().out


def test_compare_judges_it_again(engine: Path, tmp_path: Path, capsys) -> None:
    assert run_command_line(["compare", str(engine), str(small_file(tmp_path)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "rounding differences only"
    assert run_command_line(["compare", str(engine), str(small_file(tmp_path, seed=1))]) == 1
    assert "bug at" in capsys.readouterr().out.partition("why")[2]
    for flag in (["--plot", str(tmp_path / "x.png")], ["--all"]):
        assert run_command_line(["compare", str(engine), str(small_file(tmp_path)), *flag]) == 2
        assert "--plot and --all" in capsys.readouterr().err


def test_nothing_there(engine: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "none").mkdir()
    for words, says in (
        ([tmp_path / "none"], "no pictures"),
        ([f"{tmp_path}/*.png"], "no file matches"),
    ):
        assert run_segment(engine, *words, "--point", "1,1") == 2
        assert says in capsys.readouterr().err


def test_a_picture_that_overflows_is_left_out(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    build_engine(
        small_file(tmp_path), tmp_path / "half.engine", BuildConfig(dtype="float16"), check=False
    )
    embed = sam.Model.encode_image

    def embedded(model: sam.Model, images: torch.Tensor, still: VisionContext) -> torch.Tensor:
        embedding = embed(model, images, still)
        return torch.where(
            images[:, :1, :8, :8].amin((2, 3), keepdim=True) > 2, embedding * 1e6, embedding
        )

    PIL.Image.new("RGB", (80, 60), "white").save(photos / "1.png")
    monkeypatch.setattr(sam.Model, "encode_image", embedded)
    assert run_segment(tmp_path / "half.engine", photos, "--point", "5,5", "--json") == 1
    output = json.loads(capsys.readouterr().out)["images"]
    assert ["error" in each for each in output] == [False, True, False]
    assert "1.png: the picture overflows the engine's float16" in output[1]["error"]


def test_a_checkpoint_in_8_bits(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "cache"))
    checkpoint = small_file(tmp_path)
    words = [photos / "0.png", "--point", "5,5", "--json"]
    assert run_segment(checkpoint, *words, "-q", "int8", "--dtype", "bfloat16") == 0
    output = json.loads(capsys.readouterr().out)
    assert len(output["masks"]) == 3
    [engine] = (tmp_path / "cache" / "engines").iterdir()
    manifest = json.loads((engine / "manifest.json").read_text())
    assert "w8a8" in manifest["weight_formats"].values()
    assert run_segment(checkpoint, *words, "-q", "int4") == 2
    assert "take -q int8 (weights and activations) or -q fp8" in capsys.readouterr().err


def test_the_plan_of_8_bits_says_what_is_rounded(tmp_path: Path, capsys) -> None:
    assert run_command_line(["build", str(small_file(tmp_path)), "--dry-run", "-q", "fp8"]) == 0
    plan_text = " ".join(capsys.readouterr().out.split())
    assert (
        "weights of the encoder's linear layers in 8 bits, activations too, scaled by token"
        in plan_text
    )


def test_small_regions_are_filled_and_dropped(engine: Path, photos: Path, capsys) -> None:
    words = (engine, photos / "0.png", "--everything", "--points-per-side", 2, "--json")
    assert run_segment(*words, "--min-region", 50) == 0
    assert run_segment(*words, "--min-region", -1) == 2
    assert "min_mask_region_area must not be negative" in capsys.readouterr().err
