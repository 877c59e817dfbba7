"""A closing mark that a model writes with other letters, as </parameter1> or </parameter."""

from __future__ import annotations

import re
from functools import cache

_DRIFT = r"(?:[\d_]\w{0,31})?>?\s{0,8}"
"""What may stand in place of ">": no letters, so that </parameters> stays a text."""
MAX_DRIFT_CHARS = 42


class DriftedMark:
    """Finds a closing mark with other letters before one of the marks that may follow it.

    Args:
        mark: closing tag.
        following: marks that may follow it; the text alone shows no drift.
    """

    def __init__(self, mark: str, following: tuple[str, ...]) -> None:
        self._following = following
        self._begin = mark.removesuffix(">")
        self._drift, self._whole = _compile_searches(self._begin, following)
        self.max_chars = len(self._begin) + MAX_DRIFT_CHARS + max(map(len, following))

    def find(self, text: str, at: int, before: int) -> tuple[int, int]:
        """Return where the first one begins and ends; (-1, -1) if there is none.

        Args:
            text: of the answer.
            at: position from which on it may begin.
            before: position from which on it may not; no text far behind it is searched.
        """
        match = self._whole.search(text, at, before + self.max_chars)
        return match.span() if match and match.start() < before else (-1, -1)

    def find_begun(self, text: str, at: int) -> int:
        """Return where one may have begun, with a line break before it; else the text's end."""
        place = text.rfind(self._begin, at)
        match = self._drift.match(text, place) if place >= 0 else None
        if match is None or not any(
            mark.startswith(text[match.end() :]) for mark in self._following
        ):
            return len(text)
        return place - (place > at and text[place - 1] == "\n")


@cache
def _compile_searches(
    begin: str, following: tuple[str, ...]
) -> tuple[re.Pattern[str], re.Pattern[str]]:
    drift = re.escape(begin) + _DRIFT
    ends = "|".join(map(re.escape, following))
    return re.compile(drift), re.compile(rf"{drift}(?={ends})")
