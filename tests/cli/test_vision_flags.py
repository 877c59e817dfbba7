"""MiniGPT-4 from the command line: built from its parts, asked about pictures, compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from modelmill.cli.main import run_command_line
from modelmill.cli.vision_flags import MiniGPT4Files
from modelmill.core.errors import UsageError
from tests.models.minigpt4_seeded import write_checkpoint

Cli = Callable[..., tuple[int, Any, str]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("vision") / "files", shared)


@pytest.fixture(scope="module")
def unchecked_engine(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built through the command line, without acceptance."""
    out = tmp_path_factory.mktemp("unchecked") / "mini.engine"
    words = ["build", str(parts), "-o", str(out), "--dtype", "float32", "--no-check", "--quiet"]
    assert run_command_line(words) == 0
    return out


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_built_asked_and_compared(parts: Path, photo: Path, tmp_path: Path, cli: Cli) -> None:
    engine = tmp_path / "mini.engine"
    named = (
        "--llm", parts / "vicuna", "--vit", parts / "eva_vit_g.pth",
        "--qformer", parts / "blip2_pretrained_flant5xxl.pth", "--projection",
        parts / "pretrained_minigpt4.pth",
    )  # fmt: skip
    code, out, err = cli("build", "minigpt4", *named, "-o", engine, "--dtype", "float32", "--json")
    assert code == 0, err
    build_report = out
    assert build_report["acceptance"]["accepted"]
    assert build_report["acceptance"]["image_embeddings"]["rel_l2"] < 1e-5
    ask = ("--prompt", "What is this?", "--max-tokens", "6", "--temperature", "0", "--json")
    answers = []
    for images in ((), ("--image", photo), ("--image", photo, "--image", photo)):
        code, out, err = cli("run", engine, *images, *ask)
        assert code == 0, err
        answers.append(out["prompt_token_ids"])
    assert [ids.count(0) for ids in answers] == [0, 8, 16]
    code, out, err = cli("compare", engine, "minigpt4", *named)
    assert code == 0, err
    assert "rounding differences only" in out
    code, out, err = cli("compare", engine, parts / "vicuna")
    assert code != 0, "an engine with eyes is not its language model alone"


def test_talked_with(
    unchecked_engine: Path, photo: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    lines = f"Look.\n/image {photo}\nAnd this?\n/image {tmp_path / 'nothing.png'}\nBye.\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, err = cli(
        "chat", unchecked_engine, "--image", photo, "--max-tokens", "3", "--temperature", "0",
        "--json",
    )  # fmt: skip
    assert code == 0, err
    users = [each["content"] for each in out["messages"] if each["role"] == "user"]
    part_types = [[part["type"] for part in c] if isinstance(c, list) else "text" for c in users]
    assert part_types == [["image_url", "text"], ["image_url", "text"], "text"]
    assert "nothing.png" in err


@pytest.mark.parametrize("bad", [b"", b"no picture", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_is_one_line(
    unchecked_engine: Path, tmp_path: Path, cli: Cli, bad: bytes
) -> None:
    (tmp_path / "bad.png").write_bytes(bad)
    code, _, err = cli(
        "run", unchecked_engine, "--image", tmp_path / "bad.png", "--prompt", "What?"
    )
    assert code == 2
    assert "bad.png" in err
    assert len(err.strip().splitlines()) == 1


def test_flags_that_make_no_sense() -> None:
    llm, file = Path("vicuna"), Path("a.pth")
    with pytest.raises(
        UsageError, match=r"^minigpt4: there is no such folder here; .*parts with --llm"
    ):
        MiniGPT4Files().resolve_language_and_vision_paths(Path("minigpt4"))
    with pytest.raises(UsageError, match="in its place"):
        MiniGPT4Files(llm=llm, vit=file).resolve_language_and_vision_paths(Path("other"))
    with pytest.raises(UsageError, match="goes with"):
        MiniGPT4Files(llm=llm).resolve_language_and_vision_paths(Path("minigpt4"))
    assert MiniGPT4Files(llm=llm, vit=file).resolve_language_and_vision_paths(Path("minigpt4")) == (
        llm,
        (file,),
    )
    assert MiniGPT4Files(vit=file).resolve_language_and_vision_paths(llm) == (llm, (file,))
    assert MiniGPT4Files().resolve_language_and_vision_paths(llm) == (llm, ())
