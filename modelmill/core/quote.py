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
