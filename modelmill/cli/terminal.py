"""A conversation's terminal: answers wrap between words while they stream, and keys wait for the next prompt."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator

TAB = 8


class Wrapper:
    """Breaks a stream of text between words at the terminal's edge. A word is held back until it ends.

    What is wider than the terminal is left to it; wide characters (CJK) may be broken between any two.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        """columns: asked anew for each word, since a window may change its size."""
        self._columns = columns
        self._at = 0
        self._gap = ""
        self._word = ""
        self._begun = False  # the word's beginning is written already

    def feed(self, text: str) -> str:
        """What can be written after so much more text."""
        return "".join(map(self._take, text))

    def end(self) -> str:
        """What was held back."""
        return self._place()

    def _take(self, char: str) -> str:
        if char == "\n":
            out = self._place() + self._gap + char
            self._gap, self._at, self._begun = "", 0, False
            return out
        if char in " \t":
            out = self._place()
            self._gap += char
            self._begun = False
            return out
        if cells(char) > 1:
            out = self._place()
            self._word, self._begun = char, False
            return out + self._place()
        self._word += char
        # a word that fills a line will have to be broken: its beginning need not wait
        if cells(self._word) < self._columns():
            return ""
        out = self._place()
        self._begun = True
        return out

    def _place(self) -> str:
        """The word, behind its gap or on a line of its own."""
        word, self._word = self._word, ""
        if not word:
            return ""
        gap, self._gap = self._gap, ""
        width, size = max(self._columns(), 1), cells(word)
        behind = self._at
        for char in gap:
            behind += TAB - behind % TAB if char == "\t" else 1
        if self._at and behind + size > width and not self._begun:
            self._at = (size - 1) % width + 1
            return "\n" + word
        self._at = (behind + size - 1) % width + 1  # what is wider is broken by the terminal
        return gap + word


def cells(text: str) -> int:
    """Columns that a text takes on a terminal."""
    from rich.cells import cell_len

    return cell_len(text)


def wrapper() -> Wrapper | None:
    """For stdout; None where it is no terminal."""
    return Wrapper(columns) if sys.stdout.isatty() else None


def columns() -> int:
    """How wide the terminal is now."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


@contextlib.contextmanager
def hidden_keys() -> Iterator[None]:
    """While it is entered, the terminal does not show what is typed; it keeps it for who reads next.

    Only where stdin is a terminal and we are in its foreground. Ctrl-C is what it was.
    """
    try:
        import termios

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        foreground = os.tcgetpgrp(descriptor) == os.getpgrp()
    except (ImportError, AttributeError, OSError, ValueError, termios.error):
        yield
        return
    if not foreground:  # to change a terminal from behind stops the process
        yield
        return
    now = termios.tcgetattr(descriptor)
    now[3] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
