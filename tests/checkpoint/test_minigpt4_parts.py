"""The published parts of MiniGPT-4 as one checkpoint, and what is said where one is missing or is
another.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.minigpt4_parts import MiniGpt4Container
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, TensorMismatch, UnknownArchitecture
from tests.models.minigpt4_seeded import (
    projection_state,
    qformer_state,
    vision_encoder_state,
    write_checkpoint,
)

FILES = ("eva_vit_g.pth", "blip2_pretrained_flant5xxl.pth", "pretrained_minigpt4.pth")


@pytest.fixture(scope="module")
def minigpt4_folder(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("joined") / "files", shared)


@pytest.fixture
def folder(minigpt4_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(minigpt4_folder, tmp_path / "files"))


def test_found_by_what_they_hold(folder: Path) -> None:
    for number, name in enumerate(FILES):
        (folder / name).rename(folder / f"{2 - number}.pth")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.model_type == "minigpt4"
    assert checkpoint.language is not None
    assert checkpoint.language.model_type == "llama"
    assert checkpoint.config["image_embedder"]["vision_encoder"] == {
        "width": 48, "depth": 3, "heads": 3, "inner": 80, "image": 56, "patch": 14
    }  # fmt: skip
    assert json.loads(checkpoint.tokenizer_files()["image_chat.json"]) == {
        "format": "minigpt4", "prompt": "first", "tokens": 8
    }  # fmt: skip


def test_a_later_file_wins(folder: Path) -> None:
    """As upstream loads them one over the other."""
    state = torch.load(folder / FILES[2], weights_only=True)["model"]
    state["query_tokens"] = torch.full((1, 8, 32), 7.0)
    torch.save({"model": state}, folder / FILES[2])
    assert float(open_checkpoint(folder).get("query_tokens")[0, 0, 0]) == 7.0


def test_by_flags_as_well(folder: Path) -> None:
    vision = [folder / name for name in (*FILES, "minigpt4.json")]
    one, other = open_checkpoint(folder), open_checkpoint(folder / "vicuna", vision=vision)
    assert one.config == other.config
    assert sorted(one.names()) == sorted(other.names())
    assert (
        make_build_plan(other, BuildConfig()).weight_bytes
        == make_build_plan(one, BuildConfig()).weight_bytes
    )


def test_one_file_with_everything(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tower = {
        f"visual_encoder.{name}": tensor for name, tensor in vision_encoder_state(generator).items()
    }
    torch.save(
        {"model": tower | qformer_state(generator) | projection_state(generator)},
        folder / "all.pth",
    )
    for name in FILES:
        (folder / name).unlink()
    assert (
        make_build_plan(open_checkpoint(folder), BuildConfig()).checkpoint.model_type == "minigpt4"
    )


@pytest.mark.parametrize(
    ("name", "says"), list(zip(FILES, ("EVA's", "Q-Former", "projection"), strict=True))
)
def test_a_missing_part_is_named(folder: Path, name: str, says: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(folder)


def test_a_file_that_is_none_of_them(folder: Path) -> None:
    torch.save({"model": {"other.weight": torch.zeros(2)}}, folder / "other.pth")
    with pytest.raises(CheckpointError, match=r"other\.pth: holds neither"):
        open_checkpoint(folder)


def test_fewer_blocks_than_published(folder: Path) -> None:
    """Without minigpt4.json the published depth and heads hold, and what is missing is named."""
    (folder / "minigpt4.json").unlink()
    with pytest.raises((TensorMismatch, CheckpointError), match=r"blocks\.|heads"):
        make_build_plan(open_checkpoint(folder), BuildConfig())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"other": 1}, "is not a setting"),
        ({"prompt": "third"}, "first or current"),
        ({"tower": {"depth": "3"}}, "integers by name"),
        ({"tower": 3}, "integers by name"),
        ({"vision": "a.pth"}, "list of files"),
        ({"tower": {"size": 3}}, "no size"),
        ({"tower": {"depth": 3, "heads": 5}, "qformer": {"heads": 4}}, "heads"),
        ({"language": "nowhere"}, "nowhere"),
        ({"vision": ["nowhere.pth"]}, "nowhere"),
    ],
)
def test_settings_that_make_no_sense(folder: Path, settings: dict[str, object], says: str) -> None:
    (folder / "minigpt4.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=says):
        make_build_plan(open_checkpoint(folder), BuildConfig())


def test_another_language_model(folder: Path) -> None:
    config = json.loads((folder / "vicuna" / "config.json").read_text())
    (folder / "vicuna" / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(UnknownArchitecture, match="MiniGPT-4's is a llama"):
        open_checkpoint(folder)


def test_shapes_that_lie(folder: Path) -> None:
    state = torch.load(folder / FILES[0], weights_only=True)
    torch.save(state | {"pos_embed": torch.zeros(17)}, folder / FILES[0])
    with pytest.raises(TensorMismatch, match="pos_embed"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shape", [(1, 0, 48), (1, 17, 0), (0, 17, 48)], ids=str)
def test_places_that_are_none(folder: Path, shape: tuple[int, ...]) -> None:
    state = torch.load(folder / FILES[0], weights_only=True)
    torch.save(state | {"pos_embed": torch.zeros(shape)}, folder / FILES[0])
    with pytest.raises(TensorMismatch, match="pos_embed"):
        open_checkpoint(folder)


def test_a_layer_of_more_digits_than_python_reads(folder: Path) -> None:
    state = torch.load(folder / FILES[1], weights_only=True)
    inner = state.get("model", state)
    inner[f"Qformer.bert.encoder.layer.{'1' * 5000}.output.dense.weight"] = torch.zeros(1)
    torch.save(state, folder / FILES[1])
    assert open_checkpoint(folder).config["image_embedder"]["qformer"]["depth"] > 0


def test_a_projection_of_another_width(folder: Path) -> None:
    wrong = {
        "model": {"llama_proj.weight": torch.zeros(48, 32), "llama_proj.bias": torch.zeros(48)}
    }
    torch.save(wrong, folder / FILES[2])
    with pytest.raises(TensorMismatch, match="llama_proj"):
        make_build_plan(open_checkpoint(folder), BuildConfig())


def test_a_name_that_is_not_there(minigpt4_folder: Path) -> None:
    checkpoint = open_checkpoint(minigpt4_folder)
    assert isinstance(checkpoint.view, MiniGpt4Container)
    with pytest.raises(TensorMismatch, match="nothing"):
        checkpoint.get("nothing")
