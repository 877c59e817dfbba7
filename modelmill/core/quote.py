"""Foreign values in error lines."""

from __future__ import annotations


def quoted(value: object, most: int = 200) -> str:
    """``repr(value)`` cut to ``most`` characters: one line, free of what a terminal would obey, whatever it holds."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        text = "a number beyond all bounds"
    except RecursionError:
        text = "something nested beyond all bounds"
    return text if len(text) <= most else text[: most - 1] + "…"


def one_line(text: str, most: int) -> str:
    """A message of somebody else's without line breaks, cut to ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
