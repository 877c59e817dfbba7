"""The lines of a chat: history over sessions, and messages of several lines."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from modelmill.core.env import cache_dir

HISTORY_LINES = 1000
MULTILINE_QUOTES = '"""'
INPUT_PROMPT, CONTINUATION_PROMPT = "> ", ". "
EXIT_HINT, SKIP_TOOL_RESULT_HINT = "/exit or Ctrl-D leaves", "an empty line leaves the call open"


def chat_history_file() -> Path:
    """Return the file of the lines typed in earlier chats."""
    return cache_dir() / "chat_history"


def read_message(read_line: Callable[[str], str | None], prompt: str = INPUT_PROMPT) -> str | None:
    r"""Read one message; None at the end of the input.

    A backslash at the end of a line continues it. A line that begins with ``\"\"\"`` opens a
    message that ends with the line of the next ``\"\"\"``, whatever is between; the end of the
    input ends both. Pasted code may begin with them and go on behind the next ones: it is a
    message as it is. A ``KeyboardInterrupt`` of ``read_line`` after the first line drops the
    message: an empty one is returned.

    Args:
        read_line: returns a line for a prompt, without its end, or None.
        prompt: of the first line.
    """
    line = read_line(prompt)
    if line is None:
        return None
    try:
        return _read_multiline_message(line, read_line)
    except KeyboardInterrupt:
        print("\n(message dropped)")
        return ""


def _read_multiline_message(line: str, read_line: Callable[[str], str | None]) -> str:
    """Return the message that begins with this line."""
    if line.startswith(MULTILINE_QUOTES) and not _has_text_after_quotes(line):
        return _read_quoted_message(line.removeprefix(MULTILINE_QUOTES), read_line)
    lines = [line]
    while lines[-1].endswith("\\") and not lines[-1].endswith("\\\\"):
        lines[-1] = lines[-1][:-1]
        following = read_line(CONTINUATION_PROMPT)
        if following is None:
            break
        lines.append(following)
    return "\n".join(lines)


def _has_text_after_quotes(line: str) -> bool:
    """Whether text is behind the closing quotes: of a paste, which is taken as it is."""
    return bool(line.removeprefix(MULTILINE_QUOTES).partition(MULTILINE_QUOTES)[2].strip())


def _read_quoted_message(first: str, read_line: Callable[[str], str | None]) -> str:
    lines = [first]
    while MULTILINE_QUOTES not in lines[-1]:
        following = read_line(CONTINUATION_PROMPT)
        if following is None:
            return "\n".join(lines)
        lines.append(following)
    lines[-1] = lines[-1].replace(
        MULTILINE_QUOTES, "", 1
    )  # what is behind them belongs to the message
    return "\n".join(lines).strip("\n")


def read_terminal_line(prompt: str) -> str | None:
    """Read a line at the terminal, with line editing; None at Ctrl-D.

    Ctrl-C only clears the line; in a message of several lines it raises KeyboardInterrupt.
    """
    while True:
        try:
            return input(prompt).rstrip("\n")  # of a paste
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            if prompt == CONTINUATION_PROMPT:
                raise
            print(f"\n({EXIT_HINT if prompt == INPUT_PROMPT else SKIP_TOOL_RESULT_HINT})")


def read_pipe_line() -> str | None:
    """Read a line from a pipe or a file: a message as it is; None at its end."""
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def start_line_editing() -> None:
    """Give ``input`` the lines of earlier chats, and store this one's; take pastes whole.

    Where there is no readline, or the file cannot be read or written, there is no history; a paste
    of several lines is then as many messages.
    """
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    with contextlib.suppress(OSError):
        readline.read_history_file(chat_history_file())
    readline.set_history_length(HISTORY_LINES)
    atexit.register(_write_history)


def _write_history() -> None:
    import readline

    file = chat_history_file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)  # readable by its owner alone
        readline.write_history_file(file)
