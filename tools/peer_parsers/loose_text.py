"""Texts that are equal if they mean the same: content, and arguments as JSON.

A peer's test compares with ``==``; where the two sides differ only in blanks at the ends of the
content or between its words, or in how the same JSON is written, calls and content are the same.
"""

from __future__ import annotations

import json


class LooseText(str):
    """Content: how many blanks stand between words does not count."""

    __slots__ = ()

    def _meaning(self, text: str) -> object:
        return " ".join(str(text).split())

    def __eq__(self, other: object) -> bool:
        """Compare what the texts mean."""
        return self._meaning(self) == (self._meaning(other) if isinstance(other, str) else other)

    def __ne__(self, other: object) -> bool:
        """Compare what the texts mean."""
        return not self == other

    __hash__ = str.__hash__

    def __add__(self, other: str) -> LooseText:
        """Stay loose when a test joins deltas."""
        return type(self)(str(self) + str(other))

    def __radd__(self, other: str) -> LooseText:
        """Stay loose when a test joins deltas."""
        return type(self)(str(other) + str(self))


class LooseJson(LooseText):
    """Arguments: compared as JSON if both are."""

    __slots__ = ()

    def _meaning(self, text: str) -> object:
        try:
            return json.loads(str(text))
        except ValueError:
            return str(text).strip()
