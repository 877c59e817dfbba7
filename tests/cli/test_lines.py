"""Progress in lines where there is no terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli import lines, output
from modelmill.cli.lines import EVERY, Lines, line, pause
from tests.patience import until


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (("quantizing layers", 7, 32), "quantizing layers: 7 of 32 done, 41 s"),
        (("weights", 3 << 30, 12 << 30), "weights: 25 %, 41 s"),
        (("acceptance: wiring", 0, 1), "acceptance: wiring, 41 s"),
        (("building", 0, 0), "building, 41 s"),
    ],
)
def test_a_line_says_how_far_it_is(told: tuple[str, int, int], shown: str) -> None:
    assert line(*told, 41.4) == shown


def test_lines_become_rarer() -> None:
    assert pause(0) == pause(60) == EVERY
    assert pause(600) == 60


def test_a_stage_that_reports_nothing_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", heard := io.StringIO())
    monkeypatch.setattr(lines, "EVERY", 0.01)
    monkeypatch.setattr(output, "note", lambda text: print(text, file=heard))
    told = Lines("building", output.note, every=0.01)
    told.tell("quantizing layers", 7, 32)
    until(lambda: re.search(r"^quantizing layers: 7 of 32 done, \d+ s$", heard.getvalue(), re.MULTILINE))
    told.end()


def test_without_a_terminal_progress_is_lines_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Lines] = []
    monkeypatch.setattr(lines, "Lines", lambda *args: made.append(Lines(*args, every=0.01)) or made[-1])
    monkeypatch.setattr("sys.stderr", heard := io.StringIO())
    with output.progress("building", lines=True) as told:
        told("weights", 1 << 20, 1 << 22)
        until(lambda: re.search(r"^modelmill: weights: 25 %, \d+ s$", heard.getvalue(), re.MULTILINE))
    for options in ({}, {"lines": True, "quiet": True}):
        with output.progress("building", **options) as told:
            told("weights", 1, 2)
    assert len(made) == 1


class Recorded:
    """In the place of Lines: what they would have been told."""

    told: list[str]

    def __init__(self, *_: Any) -> None:
        Recorded.told = []

    def tell(self, stage: str, done: float, total: float) -> None:
        Recorded.told.append(line(stage, done, total, 0))

    def end(self) -> None:
        Recorded.told.append("ended")


def test_a_build_without_a_terminal_tells_of_itself(
    cli: Callable[..., tuple[int, Any, str]], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "Lines", Recorded)
    assert cli("build", checkpoint, "-o", tmp_path / "e.engine", "-q", "int8")[0] == 0
    told = Recorded.told
    assert told[-1] == "ended"
    assert any(each.startswith("acceptance: modules of layers: 1 of ") for each in told), told
    assert "acceptance: wiring, 0 s" in told
    assert any(each.startswith("weights") for each in told)


def test_with_json_it_says_nothing(
    cli: Callable[..., tuple[int, Any, str]], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "Lines", None)
    assert cli("build", checkpoint, "-o", tmp_path / "e.engine", "--json")[0] == 0
