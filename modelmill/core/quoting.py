"""Quotes user input in error messages."""

from __future__ import annotations


def quote(value: object, max_chars: int = 200) -> str:
    """Return ``repr(value)`` cut to ``max_chars`` characters.

    The result is one line without terminal control characters, for any value.
    """
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a number beyond all bounds"
    except RecursionError:
        text = "something nested beyond all bounds"
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def truncate_to_one_line(text: str, max_chars: int) -> str:
    """Join the lines of a message of another program and cut it to ``max_chars`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
