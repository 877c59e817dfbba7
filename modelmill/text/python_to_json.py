"""Incremental conversion of a keyword argument in Python's syntax to JSON.

Beside what its base class reads: sets, which become lists; integers with leading zeros; strings
with quotes of their own kind inside, which models forget to escape (command='sed -n '1,9p' f').
"""

from __future__ import annotations

import re

from modelmill.text.json_normalizer import (
    SET_BRACKET,
    StreamingJsonNormalizer,
    StringPathPredicate,
    suffix_overlap,
)
from modelmill.text.tool_call_reader import skip_whitespace

MAX_LOOKAHEAD_CHARS = 256
"""Characters of brackets or a name behind a quote that are waited for; then it ends its string."""
_ZEROS = re.compile(r"^(-?)0+(?=[0-9])")
_CLOSING_BRACKETS_PATTERN = re.compile(r"[)\]}\s]*")
_CALLS_END = re.compile(r"[\]}\s]*\)\s*\]")
_NAME = re.compile(r"\s*(?:[^\W\d][\w.\-]*)?\s*")


class PythonToJsonConverter(StreamingJsonNormalizer):
    """Converts one value.

    Args:
        calls_end: mark behind all calls; it ends a string with quotes inside whose own end is
            not found.
        in_braces: the value is the first item of a dict or set that is not yet known to be one.
        is_string: see ``StreamingJsonNormalizer``.
    """

    def __init__(
        self,
        calls_end: str = "",
        in_braces: bool = False,
        is_string: StringPathPredicate | None = None,
    ) -> None:
        super().__init__(is_string=is_string)
        self._calls_end, self._in_braces = calls_end, in_braces
        self._ends = self._has_quotes = False
        self._first: PythonToJsonConverter | None = None
        self._first_size = 0

    def feed(self, text: str, at: int, final: bool = False) -> int:
        """See ``StreamingJsonNormalizer.feed``."""
        self._ends = final
        return super().feed(text, at, final)

    def _normalize_number(self, run: str) -> str:
        return _ZEROS.sub(r"\1", run)

    def _open_bracket(self, text: str, at: int) -> int:
        if text[at] == "[":
            return super()._open_bracket(text, at)
        is_set = self._is_set_literal(text, at)
        if is_set is None:
            return at
        self._first, self._first_size = None, 0
        if not is_set:
            return super()._open_bracket(text, at)
        self._emit_with_pending("[")
        self._push_bracket(SET_BRACKET)
        self._state = self._scan_value
        return at + 1

    def _is_set_literal(self, text: str, at: int) -> bool | None:
        """Whether a brace opens a set: no colon is behind its first item.

        None if more text is needed. A list, dict or set cannot be the first item of either. The
        first item is kept, so that none is read twice to find out.
        """
        start = skip_whitespace(text, at + 1)
        if text[start : start + 1] in ("[", "{", "}"):
            return False
        if self._first is None:
            self._first, self._first_size = (
                PythonToJsonConverter(self._calls_end, in_braces=True),
                1,
            )
        first = self._first
        end = first.feed(text, at + self._first_size, self._ends)
        self._first_size = end - at
        rest = text[end:].lstrip()
        if first.done and rest:
            return rest[0] in ",}"
        return False if first.failed or self._ends else None

    def _open_string(self, quote: str, is_key: bool) -> None:
        self._has_quotes = False
        super()._open_string(quote, is_key)

    def _scan_string(self, text: str, at: int) -> int:
        if not (self._has_quotes and self._calls_end) or text[at] == self._quote:
            return super()._scan_string(text, at)
        end = text.find(self._calls_end, at)
        if end >= 0:
            place = super()._scan_string(text[:end], at) if end > at else at
            return place if place > at else self._mark_failed(at)
        end = len(text) - (0 if self._ends else suffix_overlap(text[at:], self._calls_end))
        return super()._scan_string(text[:end], at) if end > at else at

    def _is_closing_quote(self, text: str, at: int) -> bool | None:
        closes = self._quote_ends_string(text, at)
        self._has_quotes = self._has_quotes or closes is False
        return closes

    def _quote_ends_string(self, text: str, at: int) -> bool | None:
        """Whether the quote before a position ends its string; None if more text is needed.

        It does where the call can go on behind it. What may follow: a comma with the next item,
        a colon behind a key, or closing brackets with a comma, a mark or the end behind them.
        """
        is_inner = self._in_braces or bool(self._stack)
        limit = min(len(text), at + MAX_LOOKAHEAD_CHARS)
        closing = _CLOSING_BRACKETS_PATTERN.match(text, at, limit)
        assert closing is not None, "it may be empty"
        place = closing.end()
        brackets = closing[0].strip()
        calls_end = _CALLS_END.match(text, at, limit) is not None
        if calls_end and not is_inner:
            return True  # whatever follows: a stream does not wait for it
        if place == limit:
            return True if self._ends or limit < len(text) else None
        if text[place] == ",":
            following = "(" if ")" in brackets else "" if is_inner else "="
            return self._has_item_after_comma(text, place + 1, following)
        if text[place] == ":":
            return not brackets and (self._is_key or self._in_braces)
        if text[place] == "<":
            if not brackets and place + 1 == len(text) and not self._ends:
                return None
            return bool(brackets) or text.startswith(("</", "<|"), place)
        if not brackets:
            return False
        return calls_end or text[place].isalpha() or text[place] in "_["

    def _has_item_after_comma(self, text: str, at: int, following: str) -> bool | None:
        """Whether another item follows a comma.

        Args:
            text: of the answer.
            at: position behind the comma.
            following: what is behind the name of a keyword or a call; "": an item of a list.
        """
        limit = min(len(text), at + MAX_LOOKAHEAD_CHARS)
        name = _NAME.match(text, at, limit)
        assert name is not None, "it may be empty"
        place = name.end()
        if place == limit:
            return True if self._ends or limit < len(text) else None
        if not following:
            return name[0].strip() != "" or text[place] in "\"'[]{}()-+.0123456789"
        return text[place] in (following if name[0].strip() else ")]}")
