"""A reader that leaves, a disk that is full, a stream that was closed: every verb goes on to its
own end and code. Progress in lines where there is no terminal.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.cli import output
from modelmill.cli.main import run_command_line
from modelmill.progress_display import LogProgress, format_progress
from tests.wait import wait_until

FULL = Path("/dev/full")


def broken_pipe() -> int:
    """Return the writing end of a pipe without a reader."""
    read, write = os.pipe()
    os.close(read)
    return write


def modelmill(*words: object, **streams: Any) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MODELMILL_")
    }
    command = [sys.executable, "-m", "modelmill", *map(str, words)]
    return subprocess.run(
        command, check=False, timeout=300, text=True,
        env={**environment, "OMP_NUM_THREADS": "1", "CI": "1"}, **streams
    )  # fmt: skip


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_said_arrives(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = modelmill("buidl", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean build?" in done.stderr
    assert modelmill("--version", stdout=subprocess.PIPE).stdout.startswith("modelmill ")


def leaving(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command whose stdout has no reader."""
    out = broken_pipe()
    try:
        return modelmill(*words, stdout=out, stderr=subprocess.PIPE)
    finally:
        os.close(out)


def test_tables_without_sequences(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The plot comes after the tables: it is drawn, and a good engine is a good engine."""
    done = leaving("compare", engine, checkpoint, "--plot", tmp_path / "good.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "good.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "JSON"])
def test_an_answer_ends_where_no_client_reads_it(
    engine: Path,
    flags: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["run", str(engine), "--prompt", "Once", "--ignore-eos", "--max-tokens", "400"]
    threads = torch.get_num_threads()
    monkeypatch.setenv("CI", "1")
    with os.fdopen(broken_pipe(), "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        with output.tolerate_closed_output():
            code = run_command_line([*words, "--temperature", "0", "--threads", "1", *flags])
    torch.set_num_threads(threads)
    err = capsys.readouterr().err
    assert code == 0, err
    if not flags:
        assert " 1 answer tokens " in err or " 2 answer tokens " in err


def test_intermediate_output_without_a_reader(checkpoint: Path, tmp_path: Path) -> None:
    out = broken_pipe()
    try:
        done = modelmill(
            "build",
            checkpoint,
            "-o",
            tmp_path / "b.engine",
            "--dtype",
            "float32",
            stdout=out,
            stderr=out,
        )
    finally:
        os.close(out)
    assert done.returncode == 0
    assert (tmp_path / "b.engine").is_dir()


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "ENGINE", "--json"),
        ("inspect", "ENGINE"),
        ("run", "ENGINE", "-p", "O"),
        ("--version",),
    ],
)
def test_a_full_disk_is_one_line(engine: Path, words: tuple[str, ...]) -> None:
    words = tuple(str(engine) if word == "ENGINE" else word for word in words)
    with FULL.open("w") as out:
        done = modelmill(*words, stdout=out, stderr=subprocess.PIPE)
    assert done.returncode == 1
    # run says first how answers are drawn
    messages = [
        line for line in done.stderr.splitlines() if not line.startswith("modelmill: sampling: ")
    ]
    assert messages == [
        "modelmill: cannot write to stdout: No space left on device; the output is incomplete"
    ]


def without_stream(closed: int, out: Path, *words: str) -> int:
    """Exit code of a command whose descriptor ``closed`` is closed; the others write to ``out``."""
    command = f'exec "$@" {closed}{"<" if closed == 0 else ">"}&-'
    with out.open("w") as sink:
        done = subprocess.run(
            ["sh", "-c", command, "sh", sys.executable, "-m", "modelmill", *words],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, check=False, timeout=300,
        )  # fmt: skip
    return done.returncode


@pytest.mark.parametrize("closed", [1, 2, 0], ids=["stdout", "stderr", "stdin"])
def test_a_stream_that_was_closed_before(engine: Path, closed: int, tmp_path: Path) -> None:
    words = ("run", str(engine), "--prompt", "-" if closed == 0 else "Once", "--max-tokens", "4")
    code = without_stream(closed, tmp_path / "output", *words)
    written = (tmp_path / "output").read_text()
    assert code == 0, written
    assert "Traceback" not in written


@pytest.mark.parametrize("closed", [1, 2, 0], ids=["stdout", "stderr", "stdin"])
def test_a_version_without_a_stream(closed: int, tmp_path: Path) -> None:
    code = without_stream(closed, tmp_path / "output", "--version")
    written = (tmp_path / "output").read_text()
    assert code == 0, written
    assert "Traceback" not in written


def test_without_a_terminal_progress_is_lines_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[LogProgress] = []
    monkeypatch.setattr(
        output,
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
    monkeypatch.setattr(output, "LogProgress", RecordedLines)
    assert cli("build", checkpoint, "-o", tmp_path / "e.engine", "-q", "int8")[0] == 0
    lines = RecordedLines.lines
    assert lines[-1] == "ended"
    assert any(each.startswith("acceptance: modules of layers: 1 of ") for each in lines), lines
    assert "acceptance: wiring, 0 s" in lines
    assert any(each.startswith("weights") for each in lines)


def test_with_json_it_says_nothing(
    cli: Callable[..., tuple[int, Any, str]], checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(output, "LogProgress", None)
    assert cli("build", checkpoint, "-o", tmp_path / "e.engine", "--json")[0] == 0
