"""What is typed in a chat: messages of several lines, and the lines of earlier chats."""

from __future__ import annotations

import io
import readline
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli import chat_input
from modelmill.cli.chat_input import CONTINUATION_PROMPT, INPUT_PROMPT, read_message


def message(*lines: str) -> tuple[str | None, list[str]]:
    """The message, and the prompts that were shown."""
    rest, prompts = iter(lines), []

    def read_line(prompt: str) -> str | None:
        prompts.append(prompt)
        return next(rest, None)

    return read_message(read_line), prompts


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (("one line",), "one line"),
        (("",), ""),
        (("one\\", "two\\", "three", "next"), "one\ntwo\nthree"),
        (("a path C:\\\\",), "a path C:\\\\"),
        (("cut\\",), "cut"),
        (('"""', "a", '  b "quoted"', '"""', "next"), 'a\n  b "quoted"'),
        (('"""in one line"""',), "in one line"),
        (('"""', "a", '""" in short', "next"), "a\n in short"),
        (('"""Doc."""\nimport os\n',), '"""Doc."""\nimport os\n'),
        (('"""cut', "x"), "cut\nx"),
        (("/exit",), "/exit"),
    ],
)
def test_messages_of_several_lines(lines: tuple[str, ...], text: str) -> None:
    assert message(*lines)[0] == text


def test_the_end_of_the_input_and_the_prompts() -> None:
    assert message() == (None, [INPUT_PROMPT])
    assert message("a\\", "b")[1] == [INPUT_PROMPT, CONTINUATION_PROMPT]


@pytest.mark.parametrize("lines", [['"""', "half"], ["one\\"]], ids=["quoted", "continued"])
def test_an_interrupt_drops_a_message_of_several_lines(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(lines)

    def read(_: str) -> str:
        line = next(typed, None)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)
    assert read_message(chat_input.read_terminal_line) == ""
    assert capsys.readouterr().out == "\n(message dropped)\n"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [(INPUT_PROMPT, "(/exit or Ctrl-D leaves)"), ("weather= ", "(an empty line")],
)
def test_an_interrupt_clears_a_line_and_says_what_goes_on(
    prompt: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[Any] = iter([KeyboardInterrupt, "next"])

    def read(_: str) -> str:
        answer = next(answers)
        if answer is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(answer)

    monkeypatch.setattr("builtins.input", read)
    assert read_message(chat_input.read_terminal_line, prompt) == "next"
    assert words in capsys.readouterr().out


def test_a_pipe_gives_its_lines_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('a\\\n"""b\n'))
    assert [chat_input.read_pipe_line() for _ in range(3)] == ["a\\", '"""b', None]


@pytest.fixture
def empty_history() -> Iterator[None]:
    readline.clear_history()
    yield
    readline.clear_history()


def test_lines_of_earlier_chats_come_back(
    empty_history: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "cache"))
    registered = []
    monkeypatch.setattr(chat_input.atexit, "register", registered.append)
    chat_input.start_line_editing()
    readline.add_history("What is a watermill?")
    registered[0]()
    file = chat_input.chat_history_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    readline.clear_history()
    chat_input.start_line_editing()
    assert readline.get_history_item(1) == "What is a watermill?"


def test_a_history_that_cannot_be_written_is_none(
    empty_history: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MODELMILL_CACHE", str(tmp_path / "file"))
    registered = []
    monkeypatch.setattr(chat_input.atexit, "register", registered.append)
    chat_input.start_line_editing()
    registered[0]()
