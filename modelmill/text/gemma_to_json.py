"""Incremental conversion of Gemma's values to JSON, with marks that a model leaves out.

A string whose first mark is missing is read to its last one. Without a mark it ends where its value
does: at a bracket that closes the one around it, or at a comma before another key.
"""

from __future__ import annotations

import re

from modelmill.text.json_normalizer import (
    ATOM,
    BLANKS,
    CLOSERS,
    MAX_BARE_KEY_CHARS,
    WORDS,
    StreamingJsonNormalizer,
    StringPathPredicate,
    escape_json_text,
    suffix_overlap,
)

_KEY_BEHIND_STRING = re.compile(r"\s*(?:\}|[^\d\s{}\[\],:][^\s{}\[\],:]*\s*:(?!//))")
"""What follows a comma that ends a string: a key of one word, or the end; no address of a page."""
_KEY_BEHIND_STRING_BEGUN = re.compile(r"\s*(?:[^\d\s{}\[\],:][^\s{}\[\],:]*)?\s*(?::/?)?")
_KEY_BEHIND_NUMBER = re.compile(r"\s*(?:\}|[^{}\[\],\n:]*:)")
"""What follows a comma that ends a number: any key."""
_KEY_BEHIND_NUMBER_BEGUN = re.compile(r"\s*[^{}\[\],\n:]*")


class GemmaToJsonConverter(StreamingJsonNormalizer):
    """Converts one value.

    Args:
        string_mark: encloses strings.
        end_mark: behind the value; no string without marks goes on behind it.
        is_string: see ``StreamingJsonNormalizer``.
    """

    def __init__(
        self, string_mark: str, end_mark: str, is_string: StringPathPredicate | None = None
    ) -> None:
        super().__init__(string_mark, is_string)
        self._end_mark = end_mark
        self._inner_brackets = 0  # open in a string without its first mark
        self._is_final = False
        stops = "|".join(re.escape(mark) for mark in (string_mark, end_mark))
        self._stop_search = re.compile(rf"{stops}|[,\[\]{{}}]").search

    def feed(self, text: str, at: int, final: bool = False) -> int:
        """See ``StreamingJsonNormalizer.feed``."""
        self._is_final = final
        return super().feed(text, at, final)

    def _finish_last_atom(self, rest: str) -> None:
        """Nothing: at the end of the text the states do so."""

    def _open_marked_string(self, text: str, at: int) -> int:
        head = text[at : at + len(self._mark)]
        if head == self._mark or (self._mark.startswith(head) and not self._is_final):
            return super()._open_marked_string(text, at)
        return self._scan_atom(text, at)

    def _scan_atom(self, text: str, at: int) -> int:
        """A number or a word, or the begin of a string whose first mark is missing."""
        run = ATOM.match(text, at)
        end = run.end() if run else at
        is_number = run is not None and (not run[0][0].isalpha() or run[0] in WORDS)
        ends = self._value_ends(text, end, is_number)
        if ends is None:
            return at
        if ends and run is None:
            return self._mark_failed(at)
        if ends and run is not None and self._emit_atom(run[0]):
            return end
        self._open_string("", is_key=False)
        self._inner_brackets = 0
        self._state = self._scan_unmarked_string
        return at

    def _value_ends(self, text: str, at: int, is_number: bool) -> bool | None:
        """Whether a value without marks ends at a position; None if more text is needed."""
        blanks = BLANKS.match(text, at)
        place = blanks.end() if blanks else at
        rest = text[place : place + len(self._end_mark)]
        if self._end_mark.startswith(rest):
            return True if rest == self._end_mark or self._is_final else None
        if rest[0] == CLOSERS[self._stack[-1]]:
            return True
        return rest[0] == "," and self._comma_ends_value(text, place, is_number)

    def _comma_ends_value(self, text: str, at: int, is_number: bool) -> bool | None:
        """Whether a comma is none of the value's text; None if more text is needed."""
        if self._stack[-1] == "[":
            return True
        key, begun = (
            (_KEY_BEHIND_NUMBER, _KEY_BEHIND_NUMBER_BEGUN)
            if is_number
            else (_KEY_BEHIND_STRING, _KEY_BEHIND_STRING_BEGUN)
        )
        limit = at + 1 + MAX_BARE_KEY_CHARS
        if begun.fullmatch(text, at + 1, limit):
            if len(text) >= limit:
                return is_number  # no key is that long
            if not self._is_final:
                return None
        return key.match(text, at + 1, limit) is not None

    def _scan_unmarked_string(self, text: str, at: int) -> int:
        """A string without its first mark; blanks before its end are none of it."""
        match = self._stop_search(text, at)
        if match is None:
            size = max(suffix_overlap(text[at:], mark) for mark in (self._mark, self._end_mark))
            stop = len(text) - (0 if self._is_final else size)
            return self._write_unmarked(text, at, stop)
        stop, end = match.span()
        if match[0] == self._mark:
            self._write_string_part(escape_json_text(text[at:stop]))
            self._end_string()
            return end
        ends: bool | None = match[0] == self._end_mark
        if not ends and not self._inner_brackets:
            ends = self._value_ends(text, stop, is_number=False)
        if ends is False:
            self._inner_brackets += match[0] in "[{"
            self._inner_brackets -= match[0] in "]}" and self._inner_brackets > 0
            self._write_string_part(escape_json_text(text[at:end]))
            return end
        stop = self._write_unmarked(text, at, stop)
        if ends:
            self._end_string()
        return stop

    def _write_unmarked(self, text: str, at: int, stop: int) -> int:
        """Pass on a part of a string up to its last blanks; returns the position before those."""
        part = text[at:stop].rstrip()
        self._write_string_part(escape_json_text(part))
        return at + len(part)
