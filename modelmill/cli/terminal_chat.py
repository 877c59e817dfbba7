"""The terminal of a chat: wraps streamed answers between words and hides typed keys."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator

TAB_WIDTH = 8


class WordWrapper:
    """Wraps streamed text between words at the terminal's width; buffers a word until its end.

    A word wider than the terminal is wrapped by the terminal. Lines may break between any two wide
    characters (CJK).
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        """columns: returns the width; called for each word, since a window may be resized."""
        self._columns = columns
        self._column = 0
        self._gap = ""
        self._word = ""
        self._line_started = False  # the beginning of the word is already written

    def feed(self, text: str) -> str:
        """Add text; return what can be written now."""
        return "".join(map(self._add_char, text))

    def flush(self) -> str:
        """Return the buffered word."""
        return self._place_word()

    def _add_char(self, char: str) -> str:
        if char == "\n":
            out = self._place_word() + self._gap + char
            self._gap = ""
            self._column = 0
            self._line_started = False
            return out
        if char in " \t":
            out = self._place_word()
            self._gap += char
            self._line_started = False
            return out
        if display_width(char) > 1:
            out = self._place_word()
            self._word, self._line_started = char, False
            return out + self._place_word()
        self._word += char
        # a word wider than a line is broken anyway, so its beginning is written at once
        if display_width(self._word) < self._columns():
            return ""
        out = self._place_word()
        self._line_started = True
        return out

    def _place_word(self) -> str:
        """Return the buffered word after its whitespace, or on a new line."""
        word, self._word = self._word, ""
        if not word:
            return ""
        gap, self._gap = self._gap, ""
        width, size = max(self._columns(), 1), display_width(word)
        column = self._column
        for char in gap:
            column += TAB_WIDTH - column % TAB_WIDTH if char == "\t" else 1
        if self._column and column + size > width and not self._line_started:
            self._column = (size - 1) % width + 1
            return "\n" + word
        self._column = (column + size - 1) % width + 1  # the terminal breaks a wider word
        return gap + word


def display_width(text: str) -> int:
    """Return the columns of a text on a terminal."""
    from rich.cells import cell_len

    return cell_len(text)


def terminal_width() -> int:
    """Return the current width of the terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


@contextlib.contextmanager
def hide_typed_keys() -> Iterator[None]:
    """Hide typed keys within the context; the terminal keeps them for the next reader.

    Only if stdin is a terminal and this process is in its foreground. Ctrl-C works as before.
    """
    try:
        import termios

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        foreground = os.tcgetpgrp(descriptor) == os.getpgrp()
    except (ImportError, AttributeError, OSError, ValueError, termios.error):
        yield
        return
    if not foreground:  # a background process that changes the terminal is stopped
        yield
        return
    now = termios.tcgetattr(descriptor)
    now[3] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
