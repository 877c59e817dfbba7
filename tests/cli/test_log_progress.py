"""Progress in lines where there is no terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli import log_progress, output
from modelmill.cli.log_progress import (
    MIN_INTERVAL_SECONDS,
    LogProgress,
    format_progress,
    seconds_to_next_line,
)
from tests.wait import wait_until


@pytest.mark.parametrize(
    ("update", "shown"),
    [
        (("quantizing layers", 7, 32), "quantizing layers: 7 of 32 done, 41 s"),
        (("weights", 3 << 30, 12 << 30), "weights: 25 %, 41 s"),
        (("acceptance: wiring", 0, 1), "acceptance: wiring, 41 s"),
        (("building", 0, 0), "building, 41 s"),
    ],
)
def test_a_line_says_how_far_it_is(update: tuple[str, int, int], shown: str) -> None:
    assert format_progress(*update, 41.4) == shown


def test_lines_become_rarer() -> None:
    assert seconds_to_next_line(0) == seconds_to_next_line(60) == MIN_INTERVAL_SECONDS
    assert seconds_to_next_line(600) == 60


def test_a_stage_that_reports_nothing_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    monkeypatch.setattr(log_progress, "MIN_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(output, "print_note", lambda text: print(text, file=stderr))
    progress = LogProgress("building", output.print_note, every=0.01)
    progress.update("quantizing layers", 7, 32)
    wait_until(
        lambda: re.search(
            r"^quantizing layers: 7 of 32 done, \d+ s$", stderr.getvalue(), re.MULTILINE
        )
    )
    progress.close()


def test_without_a_terminal_progress_is_lines_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[LogProgress] = []
    monkeypatch.setattr(
        log_progress,
        "LogProgress",
        lambda *args: made.append(LogProgress(*args, every=0.01)) or made[-1],
    )
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    with output.show_progress("building", lines=True) as on_progress:
        on_progress("weights", 1 << 20, 1 << 22)
        wait_until(
            lambda: re.search(r"^modelmill: weights: 25 %, \d+ s$", stderr.getvalue(), re.MULTILINE)
        )
    for options in ({}, {"lines": True, "quiet": True}):
        with output.show_progress("building", **options) as on_progress:
            on_progress("weights", 1, 2)
    assert len(made) == 1


class RecordedLines:
    """Replaces LogProgress; keeps the lines."""

    lines: list[str]

    def __init__(self, *_: Any) -> None:
        RecordedLines.lines = []

    def update(self, stage: str, done: int, total: int) -> None:
        RecordedLines.lines.append(format_progress(stage, done, total, 0))

    def close(self) -> None:
        RecordedLines.lines.append("ended")


def test_a_build_without_a_terminal_logs_progress_lines(
    cli: Callable[..., tuple[int, Any, str]],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_progress, "LogProgress", RecordedLines)
    assert cli("build", checkpoint, "-o", tmp_path / "e.engine", "-q", "int8")[0] == 0
    lines = RecordedLines.lines
    assert lines[-1] == "ended"
    assert any(each.startswith("acceptance: modules of layers: 1 of ") for each in lines), lines
    assert "acceptance: wiring, 0 s" in lines
    assert any(each.startswith("weights") for each in lines)


def test_with_json_it_says_nothing(
    cli: Callable[..., tuple[int, Any, str]],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_progress, "LogProgress", None)
    assert cli("build", checkpoint, "-o", tmp_path / "e.engine", "--json")[0] == 0
