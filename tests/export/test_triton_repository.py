"""What ``modelmill export triton`` writes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from modelmill.cli.main import run_command_line
from modelmill.core.config import RunConfig
from modelmill.core.errors import UsageError
from modelmill.core.types import SamplingParams
from modelmill.export.triton_repository import (
    EngineStartOptions,
    _instance_kind,
    export_triton_repository,
)
from modelmill.export.triton_tensors import INPUT_TENSORS, OUTPUT_TENSORS


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")


def test_a_repository(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "export",
        "triton",
        str(stories),
        "-o",
        str(tmp_path / "repo"),
        "--max-num-seqs",
        "8",
        "--device",
        "cpu",
    ]
    assert run_command_line([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    made = tmp_path / "repo" / "stories"
    assert report == {"model": "stories", "path": str(made), "engine": "link"}
    assert sorted(str(p.relative_to(made)) for p in made.rglob("*")) == [
        "1", "1/engine", "1/model.py", "1/start.json", "config.pbtxt",
    ]  # fmt: skip
    assert (made / "1/engine").readlink() == stories.resolve()
    start = {"run": {"device": "cpu", "max_num_seqs": 8}, "chat_template": None, "waiting": 1024}
    assert json.loads((made / "1/start.json").read_text()) == start
    assert run_command_line(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "repo").iterdir()) == ["stories"]


def test_the_configuration_names_every_field(stories: Path, tmp_path: Path) -> None:
    text = (
        export_triton_repository(
            stories, tmp_path, name="a.b-c", start_options=EngineStartOptions()
        )
        / "config.pbtxt"
    ).read_text()
    assert 'name: "a.b-c"' in text
    assert "decoupled: true" in text
    assert "max_batch_size: 0" in text
    assert "count: 1, kind: KIND_CPU" in text
    names = re.findall(
        r'\{ name: "(\w+)", data_type: (TYPE_\w+), dims: \[ (-?\d+) \](, optional: true)? \}', text
    )
    assert names == [
        *((f.name, f.type, str(f.size), ", optional: true") for f in INPUT_TENSORS),
        *((f.name, f.type, str(f.size), "") for f in OUTPUT_TENSORS),
    ]
    assert text.count("{") == text.count("}")
    known = vars(SamplingParams())
    assert all(field.name in known for field in INPUT_TENSORS if field.is_sampling_param)


def test_its_model_imports_modelmill_and_holds_little(stories: Path, tmp_path: Path) -> None:
    text = (
        export_triton_repository(stories, tmp_path, start_options=EngineStartOptions())
        / "1/model.py"
    ).read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) < 25
    (model,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert model.name == "TritonPythonModel"
    assert {n.name for n in model.body if isinstance(n, ast.FunctionDef)} == {
        "initialize",
        "execute",
        "finalize",
    }


def test_a_copy_stands_alone(stories: Path, tmp_path: Path) -> None:
    made = export_triton_repository(
        stories, tmp_path, copy=True, start_options=EngineStartOptions()
    )
    copied = made / "1/engine"
    assert not copied.is_symlink()
    assert (copied / "manifest.json").read_bytes() == (stories / "manifest.json").read_bytes()
    assert {p.name for p in copied.rglob("*")} == {p.name for p in stories.rglob("*")}


def test_devices(stories: Path) -> None:
    from modelmill.artifact.store import open_artifact

    manifest = open_artifact(stories).manifest
    assert _instance_kind(manifest, RunConfig()) == "KIND_CPU"
    assert _instance_kind(manifest, RunConfig(device="cuda")) == "KIND_GPU"
    assert _instance_kind(manifest, RunConfig(device="cuda:1")) == "KIND_MODEL"
    assert _instance_kind(manifest, RunConfig(tp=2)) == "KIND_MODEL"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("onnx", "{engine}"), "export knows triton"),
        (("triton", "{engine}", "--link", "--copy"), "exclude each other"),
        (("triton", "{engine}", "--name", "../up"), "letters, digits"),
        (("triton", "{engine}", "--name", ".hidden"), "letters, digits"),
        (("triton", "/nowhere/x.engine"), "does not exist"),
        (("triton", "{engine}", "-q", "int8"), "is already built"),
        (("triton", "{engine}", "--max-waiting", "-1"), "must not be negative"),
        (
            ("triton", "{engine}", "--chat-template", "/nowhere/x.jinja"),
            "neither a file nor a template",
        ),
    ],
)
def test_mistakes(
    stories: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    line = [word.format(engine=stories) for word in words]
    assert run_command_line(["export", *line, "-o", str(tmp_path / "repo")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "repo").exists() or not list((tmp_path / "repo").iterdir())


def test_a_folder_that_cannot_be_written(stories: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        export_triton_repository(stories, tmp_path / "file", start_options=EngineStartOptions())


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"run": 3}', '{"speed": 1}', '{"run": {"speed": 1}}']
)
def test_a_start_that_was_changed(tmp_path: Path, text: str) -> None:
    (tmp_path / "start.json").write_text(text)
    with pytest.raises(UsageError, match=r"start\.json"):
        EngineStartOptions.read(tmp_path / "start.json")
