"""Foreign values in error lines."""

from __future__ import annotations


def quote(value: object, max_chars: int = 200) -> str:
    """``repr(value)`` cut to ``max_chars`` characters: one line, free of what a terminal would
    obey, whatever it holds."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        text = "a number beyond all bounds"
    except RecursionError:
        text = "something nested beyond all bounds"
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def one_line(text: str, max_chars: int) -> str:
    """A message of somebody else's without line breaks, cut to ``max_chars`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
