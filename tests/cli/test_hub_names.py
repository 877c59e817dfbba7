"""Commands that take a model take a hub's org/name; it is fetched into the cache first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelmill.checkpoint import pull
from modelmill.cli.main import execute

NAME = "karpathy/stories260K"


@pytest.fixture
def hub(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub with one repository; the names that were asked for."""
    requests: list[str] = []

    def fetch(repository: str, file: str, dest: Path) -> Path:
        requests.append(repository)
        folder = dest / repository.replace("/", "--")
        folder.mkdir(parents=True, exist_ok=True)
        for source in (shared / "data/models/stories260K").iterdir():
            (folder / source.name).write_bytes(source.read_bytes())
        return folder

    monkeypatch.setattr(pull, "_pull_hub", fetch)
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return requests


def test_a_name_is_inspected_built_compared_and_run(
    hub: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["inspect", NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "llama"
    assert execute(["build", NAME, "-o", "a.engine", "--dtype", "float32", "--quiet"]) == 0
    assert execute(["compare", "a.engine", NAME]) == 0
    command = ["run", NAME, "--dtype", "float32", "--prompt", "Once upon a time"]
    capsys.readouterr()
    assert execute([*command, "--temperature", "0", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith(", there was")
    assert hub == [NAME], "complete files are used again"


def test_a_mistyped_path_does_not_ask_the_hub(
    hub: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    assert execute(["run", "models/absent", "--prompt", "x"]) != 0
    assert execute(["serve", "models/absent"]) == 2
    assert "models/absent" in capsys.readouterr().err
    assert hub == []
