"""A conversation on a real (pseudo) terminal: whole words, keys that wait, files that are not
written over.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import random
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli.terminal_chat import WordWrapper
from tests.wait import TIMEOUT_SECONDS

Cli = Callable[..., tuple[int, Any, str]]
COLUMNS = 40
# On a terminal of its own, with an engine whose second word waits until the test has typed.
TALK = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from modelmill.outputs import RequestOutput, CompletionOutput
from modelmill.cli.chat_model import ChatDelta
from modelmill.cli.chat import ChatSession
from modelmill.cli.chat_input import read_message, read_terminal_line
from modelmill.core.types import SamplingParams

class Engine:
    def stream(self, messages, params, settings):
        answer = RequestOutput("r0", None, [1], [CompletionOutput(0)])
        for piece in ("first ", "second ", *{words!r}):
            if piece == "second ":
                os.read({gate}, 1)
            yield ChatDelta([piece], answer)

session = ChatSession(Engine(), SamplingParams(), None)
while True:
    line = read_message(read_terminal_line)
    print("read", repr(line), flush=True)
    if line in (None, "/exit"):
        break
    session.handle_line(line)
    print("echo", bool(termios.tcgetattr(0)[3] & termios.ECHO), flush=True)
"""


class Terminal:
    """A program on a pseudo terminal of its own; what it writes is read as it comes."""

    def __init__(self, words: list[str], gate: int | None = None) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("COLUMNS", "LINES", "CI")
        }
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            pass_fds=() if gate is None else (gate,),
            env={**environment, "TERM": "dumb", "INPUTRC": os.devnull},
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, mark: str, start: int = 0) -> int:
        """Read until ``mark`` has come behind ``start``; returns where it ends."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while mark not in self.text[start:]:
            left = deadline - time.monotonic()
            assert left > 0, f"no {mark!r} came: {self.text!r}"
            if select.select([self.master], [], [], left)[0]:
                try:
                    data = os.read(self.master, 4096)
                except OSError:  # the other end is closed
                    data = b""
                assert data, f"it ended without {mark!r}: {self.text!r}"
                self.text += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return self.text.index(mark, start) + len(mark)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_SECONDS)
        os.close(self.master)


@contextlib.contextmanager
def talking(words: list[str]) -> Iterator[tuple[Terminal, Callable[[], None]]]:
    """A talk with the engine above; the function lets it go on."""
    gate, opener = os.pipe()
    terminal = Terminal([sys.executable, "-c", TALK.format(words=words, gate=gate)], gate)
    try:
        yield terminal, lambda: os.write(opener, b"x") and None
    finally:
        terminal.close()
        os.close(gate)
        os.close(opener)


def test_keys_typed_into_an_answer_wait_for_the_next_prompt() -> None:
    with talking(["third"]) as (terminal, go_on):
        terminal.wait_for("> ")
        terminal.type("hello\n")
        begins = terminal.wait_for("first", terminal.wait_for("read 'hello'"))
        terminal.type("next question\nhalf a")
        go_on()
        ends = terminal.wait_for("echo", begins)
        assert terminal.text[begins:ends].split() == [
            "second",
            "third",
            "modelmill:",
            *terminal.text[begins:ends].split()[3:],
        ]
        assert "next" not in terminal.text[begins:ends]
        assert "half" not in terminal.text[begins:ends]
        at = terminal.wait_for("True", ends)  # the terminal is as it was
        at = terminal.wait_for("read 'next question'", at)
        go_on()
        at = terminal.wait_for("True", terminal.wait_for("echo", at))
        terminal.type(" line\n")
        at = terminal.wait_for("read 'half a line'", at)
        go_on()
        terminal.wait_for("True", terminal.wait_for("echo", at))
        terminal.type("/exit\n")
        terminal.wait_for("read '/exit'")
        assert terminal.process.wait(TIMEOUT_SECONDS) == 0


def test_an_answer_breaks_between_words() -> None:
    words = [f"{'abcdefghi'[: 3 + i % 7]}{i} " for i in range(40)]
    with talking(words) as (terminal, go_on):
        terminal.wait_for("> ")
        terminal.type("hello\n")
        begins = terminal.wait_for("read 'hello'")
        go_on()
        ends = terminal.wait_for("modelmill: ", begins)
        text = terminal.text[begins:ends].removesuffix("modelmill: ")
        lines = text.strip("\n").split("\n")
        assert " ".join(text.split()) == " ".join(
            ["first", "second", *(word.strip() for word in words)]
        )
        assert len(lines) > 5
        assert all(len(line) <= COLUMNS for line in lines)


def test_a_talk_with_an_engine(engine: Path) -> None:
    words = [
        "chat",
        str(engine),
        "--chat-template",
        "chatml",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
    ]
    terminal = Terminal([sys.executable, "-m", "modelmill", *words])
    try:
        terminal.type("Hello\n/exit\n")  # before there is a prompt
        terminal.wait_for("tokens/s")
        assert terminal.process.wait(TIMEOUT_SECONDS) == 0
    finally:
        terminal.close()


# -- wrapping


def wrapped(text: str, width: int, pieces: random.Random | None = None) -> str:
    wrapper, out = WordWrapper(lambda: width), ""
    while text:
        size = len(text) if pieces is None else pieces.randint(1, 7)
        out, text = out + wrapper.feed(text[:size]), text[size:]
    return out + wrapper.flush()


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("one two three", 20, "one two three"),
        ("one two three", 9, "one two\nthree"),
        ("one two", 7, "one two"),
        ("one two", 6, "one\ntwo"),
        ("one two\n\nthree", 5, "one\ntwo\n\nthree"),
        ("a " + "x" * 25 + " b", 10, "a\n" + "x" * 25 + " b"),
        ("  code indented", 10, "  code\nindented"),
        ("北京北京北京", 6, "北京北\n京北京"),
        ("ends ", 10, "ends"),
        ("ends \nhere", 10, "ends \nhere"),
        ("", 10, ""),
        ("word", 1, "word"),
        ("a\tb\tc", 12, "a\tb\nc"),
    ],
)
def test_where_lines_end(text: str, width: int, shown: str) -> None:
    assert wrapped(text, width) == shown


@pytest.mark.parametrize("seed", range(20))
def test_pieces_make_no_difference_and_no_word_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    width = draw.randint(4, 60)
    alphabet = "ab cd  ef\ngh ij é" + "kl mn op " * 3
    text = "".join(draw.choices(alphabet, k=400))
    shown = wrapped(text, width)
    assert all(wrapped(text, width, random.Random(each)) == shown for each in range(3))
    assert "".join(shown.split()) == "".join(text.split())
    for line in shown.split("\n"):
        # the terminal breaks where a column is a multiple of its width
        for word in re.finditer(r"\S+", line):
            assert word.start() % width + len(word[0]) <= width or len(word[0]) > width, (
                line,
                word,
            )


# -- what is written over, and what cannot be had


def test_save_writes_over_nothing_but_its_own(
    cli: Cli, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign_file, own = tmp_path / "kept.json", tmp_path / "own.json"
    missing_file = tmp_path / "none" / "x.json"
    foreign_file.write_text("mine")
    lines = (
        f"/save {foreign_file}\nHello\n/save {own}\nAgain\n/save {own}\n/save\n/save {tmp_path}\n"
    )
    words = ("chat", engine, "--chat-template", "chatml", "--temperature", 0, "--max-tokens", 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, _ = cli(*words)
    assert code == 0
    assert f"{foreign_file} exists; /save! {foreign_file} replaces it" in out
    assert f"{tmp_path} is a folder" in out
    assert foreign_file.read_text() == "mine"
    assert len(json.loads(own.read_text())) == 4, "what this talk has saved it may save again"
    monkeypatch.setattr(
        sys, "stdin", io.StringIO(f"Hello\n/save! {foreign_file}\n/save! {missing_file}\n")
    )
    code, out, _ = cli(*words)
    assert len(json.loads(foreign_file.read_text())) == 2
    assert f"cannot write {missing_file}: No such file or directory" in out


def test_an_answer_that_cannot_be_so_long_is_reported_once(
    cli: Cli, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "run",
        engine,
        "--temperature",
        0,
        "--max-model-len",
        32,
        "--prompt",
        "Once upon a time",
    )
    warning = (
        "--max-tokens 100000: the answer ends after at most 27 tokens, since the engine's "
        "context is 32 tokens and the"
    )
    for more in ((), ("--json",)):
        code, _, err = cli(*words, "--max-tokens", 100000, *more)
        assert code == 0
        assert err.count(f"modelmill: {warning} prompt takes 5\n") == 1
    assert "after at most" not in cli(*words)[2], "nobody asked for 512"
    assert "after at most" not in cli(*words, "--max-tokens", 27)[2]
    assert "--max-tokens 28: the answer ends after at most 27" in cli(*words, "--max-tokens", 28)[2]
    assert "--min-tokens 40: the answer ends after at most 27" in cli(*words, "--min-tokens", 40)[2]
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"text": "Once"}\n{"text": "Once upon a time"}\n')
    err = cli("run", engine, "--file", jobs, "--max-model-len", 32, "--max-tokens", 28)[2]
    assert "--max-tokens 28: 1 of 2 answers end after at most 27" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nHo\n"))
    err = cli(
        "chat", engine, "--chat-template", "chatml", "--max-tokens", 9999, "--max-model-len", 128
    )[2]
    assert err.count("--max-tokens 9999: the answer ends after at most") == 1
