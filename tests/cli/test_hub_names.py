"""Commands that take a model take a hub's org/name; it is fetched into the cache first."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelmill import llm
from modelmill.checkpoint import pull
from modelmill.cli import compare
from modelmill.cli.main import run_command_line
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError

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
    assert run_command_line(["inspect", NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "llama"
    assert run_command_line(["build", NAME, "-o", "a.engine", "--dtype", "float32", "--quiet"]) == 0
    assert run_command_line(["compare", "a.engine", NAME]) == 0
    assert run_command_line(["compare", NAME, NAME, "--dtype", "float32"]) == 0
    command = ["run", NAME, "--dtype", "float32", "--prompt", "Once upon a time"]
    capsys.readouterr()
    assert run_command_line([*command, "--temperature", "0", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith(", there was")
    assert hub == [NAME], "complete files are used again"


def test_compiling_is_announced_before_an_engine_is_planned(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Planned(Exception):
        pass

    def plan(*_: object) -> None:
        raise Planned

    announced: list[str] = []
    monkeypatch.setattr(llm, "ensure_cpu_kernels_compiled", lambda name, _: announced.append(name))
    monkeypatch.setattr("modelmill.builder.plan.make_build_plan", plan)
    with pytest.raises(Planned):
        llm.ensure_cached_engine(shared / "data/models/stories260K", BuildConfig(target="cpu"))
    assert announced == ["cpu"]


def test_a_mistyped_path_does_not_ask_the_hub(
    hub: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    for words in (["run", "models/absent", "--prompt", "x"], ["serve", "models/absent"]):
        assert run_command_line(words) == 1
        # at once: without a line of progress about the import of torch
        assert re.fullmatch(
            "modelmill: models/absent: there is no such file .*\n", capsys.readouterr().err
        )
    assert hub == []


def test_pulling_is_shown_before_opening_not_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines of progress at a time write over each other."""
    shown: list[str] = []
    pulled_beside: list[list[str]] = []

    @contextlib.contextmanager
    def show(label: str, **_: object) -> Iterator[Callable[..., None]]:
        shown.append(label)
        yield lambda *_: None
        shown.remove(label)

    def pull_if_missing(*_: object) -> Path:
        pulled_beside.append(list(shown))
        raise CheckpointError("no network")

    monkeypatch.setattr(compare, "show_progress", show)
    monkeypatch.setattr(compare, "resolve_or_pull_model", pull_if_missing)
    assert run_command_line(["compare", NAME, NAME]) == 1
    assert pulled_beside == [[]]
