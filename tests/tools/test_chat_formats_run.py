"""The command that checks random conversations: counts, goes on after a stop, names failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.chat_formats import __main__ as command
from tools.chat_formats import passed_runs, run_checks
from tools.chat_formats.run_checks import FormatRun


def test_a_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "progress.json"
    words = ["--format", "hermes", "glm47", "--progress", str(path)]
    assert command.main([*words, "--count", "20"]) == 0
    assert json.loads(path.read_text())["glm47"]["checked"] == 20
    assert command.main([*words, "--count", "30"]) == 0
    assert json.loads(path.read_text())["hermes"]["checked"] == 30
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "hermes: 20 answers",
        "glm47: 20 answers",
        "hermes: 30 answers",
        "glm47: 30 answers",
    ]


def test_failures_are_counted_and_stop_a_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("differs")

    monkeypatch.setattr(run_checks, "check_answer", fail)
    monkeypatch.setattr(run_checks, "CHUNK", 10)
    assert command.main(["--format", "hermes", "--count", "50"]) == 1
    out, errors = capsys.readouterr()
    assert "hermes: 10 answers" in out
    assert "10 failures" in out
    assert errors.splitlines()[0] == "hermes: seed 0: differs"


def test_an_interrupted_run_keeps_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []

    def interrupt(*_: object) -> None:
        checked.append(1)
        if len(checked) > 15:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_checks, "check_answer", interrupt)
    monkeypatch.setattr(run_checks, "CHUNK", 10)
    path = tmp_path / "progress.json"
    words = ["--format", "hermes", "--progress", str(path), "--count", "50"]
    assert command.main(words) == command.INTERRUPTED
    assert json.loads(path.read_text())["hermes"]["checked"] == 15


def test_several_formats_at_once_are_the_same_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "progress.json"
    words = ["--format", "hermes", "glm47", "json", "--progress", str(path), "--jobs", "2"]
    assert command.main([*words, "--count", "20"]) == 0
    assert command.main([*words, "--count", "30"]) == 0
    assert {run["checked"] for run in json.loads(path.read_text()).values()} == {30}
    lines = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(lines[:3]) == ["glm47: 20 answers", "hermes: 20 answers", "json: 20 answers"]
    assert len(lines) == 6


def test_no_process_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--jobs", "0"])
    assert "--jobs must be at least 1, not 0" in capsys.readouterr().err


def test_the_longest_passed_run_of_a_format_is_kept(tmp_path: Path) -> None:
    passed_runs.save_passed([FormatRun("a", checked=30), FormatRun("b", checked=20)], tmp_path)
    later = [
        FormatRun("a", checked=20),
        FormatRun("b", checked=40, failures=["seed 3: differs"]),
        FormatRun("c", first_seed=7, checked=20),
    ]
    passed_runs.save_passed(later, tmp_path)
    passed = passed_runs.load_passed(tmp_path)
    assert {name: run.answers for name, run in passed.items()} == {"a": 30, "b": 20}
    [head, _, *lines] = passed_runs.passed_table(passed).splitlines()
    assert head.startswith("| answers")
    assert [line.split(" | ")[0] for line in lines] == ["| 20", "| 30"]
