"""Incremental conversion of a value, as models write it, to JSON.

Valid JSON stays as it is. Accepted besides: single quotes, Python's True, False, None and escapes,
NaN and Infinity as null, line breaks inside strings, a comma before a closing bracket, and, with a
string mark, Gemma's bare keys and marked strings. The output is a prefix of valid JSON at every
point.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_RUNS = {
    '"': re.compile(r'[^"\\\x00-\x1f]+'),
    "'": re.compile(r"[^\"'\\\x00-\x1f]+"),
}
BLANKS = re.compile(r"[ \t\r\n]+")
ATOM = re.compile(r"[A-Za-z0-9+\-._]+")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
WORDS = {
    **{word: word for word in ("true", "false", "null")},
    "True": "true",
    "False": "false",
    "None": "null",
}
NON_FINITE_WORDS = dict.fromkeys(("NaN", "Infinity", "-Infinity"), "null")
"""What JavaScript and Python write for numbers that JSON cannot express."""
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_ESCAPE_DIGIT_COUNTS = {"u": 4, "x": 2, "U": 8}
MAX_BARE_KEY_CHARS = 1024
"""Maximum characters of a key without quotes."""
SET_BRACKET = "set"
"""An open set of Python's syntax, which becomes a list."""
CLOSERS = {"[": "]", "{": "}", SET_BRACKET: "}"}
JSON_OUTPUT_CLOSERS = {"[": "]", "{": "}", SET_BRACKET: "]"}


def suffix_overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``mark``."""
    start = max(0, len(text) - len(mark) + 1)
    at = text.find(mark[:1], start) if mark else -1
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0


def escape_json_text(text: str) -> str:
    """Return the text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


StringPathPredicate = Callable[[tuple[str, ...]], bool]
"""Whether the value at a path of keys ("" for an element of a list) is always a string."""


class StreamingJsonNormalizer:
    """Converts one value.

    Args:
        string_mark: encloses strings instead of quotes.
        is_string: where a number or a word is a string, since the tool declares one; None: nowhere.

    Attributes:
        done: the value is complete.
        failed: the text cannot be a value.
    """

    def __init__(self, string_mark: str = "", is_string: StringPathPredicate | None = None) -> None:
        self.done = self.failed = False
        self._mark = string_mark
        self._declares_string = is_string
        self._path: list[str] = []  # the last key of each open bracket
        self._key_text: list[str] = []
        self._stack: list[str] = []
        self._state: Callable[[str, int], int] = self._scan_value
        self._out: list[str] = []
        self._pending = ""  # a comma and blanks that the next item confirms
        self._quote = ""
        self._is_key = False

    def feed(self, text: str, at: int, final: bool = False) -> int:
        """Consume from a position on; returns the next position.

        It is before the end of the text if the value is complete, or failed there, or if what
        follows is needed to decide; ``final``: nothing follows.
        """
        while at < len(text) and not (self.done or self.failed):
            before, state = at, self._state
            at = self._state(text, at)
            if at == before and state == self._state:
                break  # more text is needed
        if final and not (self.done or self.failed):
            self._finish_last_atom(text[at:])
            at = len(text)
        return at

    def drain_json(self) -> str:
        """Return the JSON since the last call."""
        out, self._out = "".join(self._out), []
        return out

    @property
    def depth(self) -> int:
        """Open brackets."""
        return len(self._stack)

    def _finish_last_atom(self, rest: str) -> None:
        """Convert the number or word that the end of the text completes."""
        if self._state in (self._scan_value, self._scan_member_value) and ATOM.fullmatch(rest):
            self._emit_atom(rest)

    def _mark_failed(self, at: int) -> int:
        self.failed = True
        return at

    def _emit_with_pending(self, text: str) -> None:
        if self._pending:
            self._out.append(self._pending)
            self._pending = ""
        self._out.append(text)

    def _on_value_end(self) -> None:
        if self._stack:
            self._state = self._scan_comma_or_close
        else:
            self.done = True

    def _buffer_whitespace(self, text: str, at: int) -> int:
        """Keep blanks for the next item; returns the position behind them."""
        match = BLANKS.match(text, at)
        if match is None:
            return at
        self._pending += match[0]
        return match.end()

    # -- states

    def _scan_value(self, text: str, at: int) -> int:
        match = BLANKS.match(text, at)
        if match:
            if self._stack:
                self._pending += match[0]
            return match.end()
        char = text[at]
        if self._stack and self._stack[-1] != "{" and char == CLOSERS[self._stack[-1]]:
            return self._close_container(at)
        if self._mark and self._mark.startswith(char):
            return self._open_marked_string(text, at)
        if char in "\"'":
            self._open_string(char, is_key=False)
            return at + 1
        if char in "{[":
            return self._open_bracket(text, at)
        return self._scan_atom(text, at)

    def _scan_atom(self, text: str, at: int) -> int:
        """A number or a word."""
        run = ATOM.match(text, at)
        if run is None:
            return self._mark_failed(at)
        if run.end() == len(text):
            return at
        if not self._emit_atom(run[0]):
            return self._mark_failed(at)
        return run.end()

    def _open_bracket(self, text: str, at: int) -> int:
        self._emit_with_pending(text[at])
        self._push_bracket(text[at])
        self._state = self._scan_key if text[at] == "{" else self._scan_value
        return at + 1

    def _push_bracket(self, bracket: str) -> None:
        self._stack.append(bracket)
        self._path.append("")

    def _emit_atom(self, run: str) -> bool:
        is_null = WORDS.get(run) == "null"
        if not is_null and self._declares_string and self._declares_string(tuple(self._path)):
            self._emit_with_pending(f'"{escape_json_text(run)}"')
            self._on_value_end()
            return True
        run = self._normalize_number(run)
        word = (
            WORDS.get(run) or NON_FINITE_WORDS.get(run) or (run if NUMBER.fullmatch(run) else None)
        )
        if word is None:
            return False
        self._emit_with_pending(word)
        self._on_value_end()
        return True

    def _normalize_number(self, run: str) -> str:
        """Return what may be a number as JSON writes it."""
        return run

    def _open_marked_string(self, text: str, at: int) -> int:
        head = text[at : at + len(self._mark)]
        if head == self._mark:
            self._open_string("", is_key=False)
            return at + len(self._mark)
        return at if self._mark.startswith(head) else self._mark_failed(at)

    def _open_string(self, quote: str, is_key: bool) -> None:
        self._emit_with_pending('"')
        self._quote, self._is_key = quote, is_key
        self._key_text = []
        self._state = self._scan_string if quote else self._scan_marked_string

    def _end_string(self) -> None:
        self._out.append('"')
        if self._is_key:
            self._path[-1] = json.loads(f'"{"".join(self._key_text)}"')
            self._state = self._scan_colon
        else:
            self._on_value_end()

    def _scan_key(self, text: str, at: int) -> int:
        if (end := self._buffer_whitespace(text, at)) > at:
            return end
        char = text[at]
        if char == "}":
            return self._close_container(at)
        if char in "\"'":
            self._open_string(char, is_key=True)
            return at + 1
        if not self._mark:
            return self._mark_failed(at)
        if self._mark.startswith(char):
            head = text[at : at + len(self._mark)]
            if head == self._mark:
                self._open_string("", is_key=True)
                return at + len(self._mark)
            if self._mark.startswith(head):
                return at
        limit = at + MAX_BARE_KEY_CHARS
        end = text.find(":", at, limit)
        if end < 0 and len(text) >= limit:
            return self._mark_failed(at)
        bad = re.compile(r"[{}\[\],\n]").search(text, at, end if end >= 0 else len(text))
        if bad:
            return self._mark_failed(at)
        if end < 0:
            return at
        self._path[-1] = text[at:end].strip()
        self._emit_with_pending(f'"{escape_json_text(self._path[-1])}"')
        self._state = self._scan_colon
        return end

    def _scan_colon(self, text: str, at: int) -> int:
        match = BLANKS.match(text, at)
        if match:
            self._out.append(match[0])
            return match.end()
        if text[at] != ":":
            return self._mark_failed(at)
        # Gemma writes no blank; JSON libraries do
        self._out.append(": " if self._mark else ":")
        self._state = self._scan_member_value
        return at + 1

    def _scan_member_value(self, text: str, at: int) -> int:
        """The value of a key, which must not be missing."""
        if text[at] in "]}":
            return self._mark_failed(at)
        state = self._state
        at = self._scan_value(text, at)
        if self._state == state and self._pending and not self.failed:
            self._out.append(self._pending)
            self._pending = ""
        return at

    def _scan_comma_or_close(self, text: str, at: int) -> int:
        if (end := self._buffer_whitespace(text, at)) > at:
            return end
        char = text[at]
        if char == CLOSERS[self._stack[-1]]:
            return self._close_container(at)
        if char != ",":
            return self._mark_failed(at)
        self._pending += ", " if self._mark else ","
        self._state = self._scan_key if self._stack[-1] == "{" else self._scan_value
        return at + 1

    def _close_container(self, at: int) -> int:
        """End a container; a comma before it is dropped, blanks stay."""
        self._pending = self._pending.replace(",", "")
        self._emit_with_pending(JSON_OUTPUT_CLOSERS[self._stack.pop()])
        self._path.pop()
        self._on_value_end()
        return at + 1

    def _write_string_part(self, text: str) -> None:
        """Pass on a part of a string."""
        self._out.append(text)
        if self._is_key:
            self._key_text.append(text)

    def _scan_string(self, text: str, at: int) -> int:
        run = _RUNS[self._quote].match(text, at)
        if run:
            self._write_string_part(run[0])
            return run.end()
        char = text[at]
        if char == self._quote:
            closes = self._is_closing_quote(text, at + 1)
            if closes is None:
                return at
            if closes:
                self._end_string()
            else:
                self._write_string_part(escape_json_text(char))
        elif char == "\\":
            return self._scan_escape(text, at)
        else:
            self._write_string_part(escape_json_text(char))
        return at + 1

    def _is_closing_quote(self, _text: str, _at: int) -> bool | None:
        """Whether the quote before a position ends its string; None if more text is needed."""
        return True

    def _scan_escape(self, text: str, at: int) -> int:
        if at + 1 == len(text):
            return at
        char = text[at + 1]
        if char in _SIMPLE_ESCAPES:
            self._write_string_part(text[at : at + 2])
            return at + 2
        size = _ESCAPE_DIGIT_COUNTS.get(char, 0)
        if size:
            digits = text[at + 2 : at + 2 + size]
            if not _HEX_DIGITS.issuperset(digits):
                self._write_string_part("\\\\")
                return at + 1
            if len(digits) < size:
                return at
            code = int(digits, 16)
            big = size == 8 and code <= 0x10FFFF
            self._write_string_part(
                escape_json_text(chr(code)) if big else f"\\u{digits[-4:].zfill(4)}"
            )
            return at + 2 + size
        if char == "'":
            self._write_string_part("'")
            return at + 2
        self._write_string_part("\\\\")  # not an escape: a backslash
        return at + 1

    def _scan_marked_string(self, text: str, at: int) -> int:
        end = text.find(self._mark, at)
        stop = end if end >= 0 else len(text) - suffix_overlap(text[at:], self._mark)
        if stop > at:
            self._write_string_part(escape_json_text(text[at:stop]))
        if end < 0:
            return stop
        self._end_string()
        return end + len(self._mark)


def normalize_json(text: str) -> str | None:
    """Convert a whole value to JSON; None if it is not one value."""
    stream = StreamingJsonNormalizer()
    at = stream.feed(text, 0, final=True)
    return stream.drain_json() if stream.done and not text[at:].strip() else None


def split_json_object(text: str) -> list[tuple[str, str]] | None:
    """Split a JSON object into keys and the JSON text of their values; None if it is not one."""
    stream_at = len(text) - len(text.lstrip())
    if text[stream_at : stream_at + 1] != "{":
        return None
    at, pairs = stream_at + 1, list[tuple[str, str]]()
    while True:
        at = _skip_whitespace(text, at)
        if text[at : at + 1] == "}" and not text[at + 1 :].strip():
            return pairs
        if pairs:
            if text[at : at + 1] != ",":
                return None
            at = _skip_whitespace(text, at + 1)
        key, at = _normalize_json_value_at(text, at)
        at = _skip_whitespace(text, at)
        if key is None or key[:1] != '"' or text[at : at + 1] != ":":
            return None
        value, at = _normalize_json_value_at(text, _skip_whitespace(text, at + 1))
        if value is None:
            return None
        pairs.append((json.loads(key), value))


def _normalize_json_value_at(text: str, at: int) -> tuple[str | None, int]:
    stream = StreamingJsonNormalizer()
    at = stream.feed(text, at)
    return (stream.drain_json() if stream.done else None), at


def _skip_whitespace(text: str, at: int) -> int:
    match = BLANKS.match(text, at)
    return match.end() if match else at
