"""Progress for who waits: on a terminal, in a notebook, in a log."""

from __future__ import annotations

import io
import re
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelmill import LLM, SamplingParams, progress_display
from modelmill.loader import device
from modelmill.ops.cpu.common import build as kernels
from modelmill.progress_display import (
    MIN_INTERVAL_SECONDS,
    CancellableDelayedCall,
    LogProgress,
    NotebookProgress,
    TerminalProgress,
    format_bar_line,
    format_progress,
    seconds_until_next_line,
    show_progress,
)
from tests.wait import wait_until


class Tty(io.StringIO):
    """A terminal that keeps what it is shown."""

    def isatty(self) -> bool:
        return True


class Notebook:
    """Jupyter's display: outputs that change in place. No widgets are there."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Notebook.Handle:
        assert raw
        assert display_id
        self.outputs.append([data["text/plain"]])
        return Notebook.Handle(self.outputs[-1])

    class Handle:
        def __init__(self, lines: list[str]) -> None:
            self.lines = lines

        def update(self, data: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.lines.append(data["text/plain"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook()
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=made.display))
    monkeypatch.setattr(progress_display, "REFRESH_SECONDS", 0.001)
    return made


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """stderr as a terminal; called in the test, since pytest replaces stderr after the fixtures."""
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", tty := Tty())
    return tty


def test_a_bar_in_words() -> None:
    assert format_bar_line("weights", 1, 4, 7.4) == f"weights {'━' * 6}{'─' * 18}  25 %, 7 s"
    assert format_bar_line("acceptance: wiring", 0, 1, 12) == "acceptance: wiring, 12 s"
    assert " 100 %" in format_bar_line("weights", 5, 4, 0)


def test_a_notebook_sees_the_stages_and_nothing_in_the_end(notebook: Notebook) -> None:
    with show_progress("opening") as report:
        assert notebook.outputs[0][0].startswith("opening, "), (
            "at once, before anything is reported"
        )
        report("weights", 1, 2)
        wait_until(
            lambda: any("weights" in line and " 50 %" in line for line in notebook.outputs[0])
        )
    assert notebook.outputs[0][-1] == ""
    assert len(notebook.outputs) == 1, "one output changes in place"


def test_short_work_in_a_notebook_shows_nothing(notebook: Notebook) -> None:
    with show_progress("prompts", delay=1000.0) as report:
        report("prompts", 1, 2)
    assert notebook.outputs == []
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_a_terminal_shows_one_stage_at_a_time_and_it_vanishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = terminal_of(monkeypatch)
    with show_progress("opening") as report:
        report("weights", 97, 100)
        report("acceptance", 0, 1)
        wait_until(lambda: "acceptance" in terminal.getvalue())
    output = terminal.getvalue()
    assert output.rstrip("\n").rpartition("\n")[2].endswith("\x1b[2K"), (
        "the last thing is that the line is erased"
    )


def test_stages_take_each_others_place() -> None:
    line = TerminalProgress("opening", delay=1000.0)
    line.update("weights", 97, 100)
    assert (line._bars.tasks[0].description, line._bars.tasks[0].fields["share"]) == (
        "weights",
        " 97 %",
    )
    line.update("weights", 100, 100)
    assert not line._bars.tasks[0].finished, "its clock and its spinner go on"
    line.update("wiring", 0, 1)
    (task,) = line._bars.tasks
    assert (task.description, task.total, task.fields["share"]) == ("wiring", None, "")
    line.close()


def test_plain_output_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    with show_progress("opening") as report:
        report("weights", 1, 2)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("enabled", [None, False])
def test_a_compilation_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, enabled: bool | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    with show_progress("opening", enabled=enabled) as report:
        report("weights", 1, 2)
        report(device.COMPILING_STAGE, 0, 1)
        report(device.COMPILING_STAGE, 0, 1)
    assert stderr.getvalue() == (
        "" if enabled is False else f"modelmill: {device.COMPILING_STAGE}\n"
    )


def test_what_is_delayed_is_not_started_when_it_is_over() -> None:
    started: list[int] = []
    delayed = CancellableDelayedCall(lambda: started.append(1), 1000.0)
    delayed.cancel()
    assert not delayed.started
    assert not started
    immediate = CancellableDelayedCall(lambda: started.append(1), 0.0)
    immediate.cancel()
    assert immediate.started
    assert started == [1]


def test_opening_an_engine_says_that_kernels_compile(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notebook: Notebook
) -> None:
    """In a notebook, where fifteen seconds looked dead."""
    load: Callable[[], Any] = kernels.load_or_compile_library
    load()  # nothing is compiled here
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path))
    visited: list[bool] = []

    def compiling() -> Any:
        if not visited:
            visited.append(True)
            wait_until(
                lambda: any(
                    device.COMPILING_STAGE in line for output in notebook.outputs for line in output
                )
            )
        return load()

    monkeypatch.setattr(kernels, "load_or_compile_library", compiling)
    monkeypatch.setattr(kernels, "needs_compile", lambda: not visited)
    with LLM(shared / "data/models/stories260K", device="cpu") as llm:
        assert visited
        assert llm.generate("Once", SamplingParams(temperature=0, max_tokens=2))[0].finished
    assert all(output[-1] == "" for output in notebook.outputs)


def test_progress_can_be_turned_off_or_taken(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notebook: Notebook
) -> None:
    kernels.load_or_compile_library()
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path))
    reports: list[tuple[Any, ...]] = []
    folder = shared / "data/models/stories260K"
    LLM(folder, device="cpu", progress=False).close()
    LLM(
        folder, device="cpu", quantization="int8", progress=lambda *each: reports.append(each)
    ).close()
    assert notebook.outputs == []
    assert all(len(each) == 3 for each in reports)


def test_the_class_of_a_notebook_is_found_without_importing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not progress_display.in_notebook()
    assert "IPython" not in sys.modules
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not progress_display.in_notebook(), "IPython in a terminal, or only imported"
    assert NotebookProgress.__doc__


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
    assert seconds_until_next_line(0) == seconds_until_next_line(60) == MIN_INTERVAL_SECONDS
    assert seconds_until_next_line(600) == 60


def test_a_stage_that_reports_nothing_is_logged() -> None:
    lines: list[str] = []
    log_progress = LogProgress("building", lines.append, every=0.01)
    log_progress.update("quantizing layers", 7, 32)
    wait_until(
        lambda: any(re.fullmatch(r"quantizing layers: 7 of 32 done, \d+ s", x) for x in lines)
    )
    log_progress.close()
