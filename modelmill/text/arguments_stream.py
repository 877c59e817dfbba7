"""The arguments of one call as a client gets them: JSON that every parser reads.

A model writes what its own JSON library takes: numbers that no double holds, halves of surrogate
pairs. It may also end a call, or break it, in the middle of its arguments. All readers of calls
pass arguments through here, so that every format and every dialect has the same.
"""

from __future__ import annotations

import math
import re
import sys

from modelmill.text.json_normalizer import JSON_OUTPUT_CLOSERS, NUMBER, StreamingJsonNormalizer
from modelmill.text.tokenizer_base import replace_surrogates

LARGEST_FLOAT = repr(sys.float_info.max)
LARGEST_INTEGER = str(int(sys.float_info.max))
_HIGH_SURROGATE_ESCAPE = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW_SURROGATE_ESCAPE = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SURROGATE_ESCAPE = re.compile(
    f"(?P<pair>{_HIGH_SURROGATE_ESCAPE}{_LOW_SURROGATE_ESCAPE})"
    f"|(?P<high>{_HIGH_SURROGATE_ESCAPE})|{_LOW_SURROGATE_ESCAPE}"
)
_PARTIAL_LOW_SURROGATE = re.compile(r"|\\|\\u|\\u[dD]|\\u[dD][c-fC-F][0-9a-fA-F]?")
"""What may become the second half of a pair."""
_REPLACEMENT = r"\ufffd"


def clamp_number_to_double(number: str) -> str:
    """Return a number that a double holds: of one that is too large the nearest.

    An integer stays one. Without this, JavaScript reads Infinity, and Python refuses integers of
    more than 4,300 digits.
    """
    if len(number) < sys.float_info.max_10_exp and "e" not in number.lower():
        return number
    if not NUMBER.fullmatch(number) or math.isfinite(float(number)):
        return number
    sign, digits = ("-", number[1:]) if number[0] == "-" else ("", number)
    return sign + (LARGEST_INTEGER if digits.isdecimal() else LARGEST_FLOAT)


class ArgumentsStream(StreamingJsonNormalizer):
    """Passes the JSON of one call's arguments on, as it comes.

    Numbers have the range of a double, and half of a surrogate pair is U+FFFD. A key is passed on
    with its value, so that one without a value can be dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rest = ""  # an escape that is not complete yet
        self._key_begin = 0  # of the last key, in what is not taken

    def append(self, text: str) -> str:
        """Add text that begins JSON or continues it; returns what can be passed on."""
        text = self._rest + replace_surrogates(text)
        self._rest = text[self.feed(text, 0) :]
        if self._rest:
            # a number comes as a whole, so that its end is here
            self._finish_last_atom(self._rest)
            self._rest = "" if self._state == self._scan_comma_or_close else self._rest
        return self.drain_json()

    def complete(self) -> str:
        """Return what makes valid JSON of the text so far, and end it.

        An open string, list or object is closed; a key without a value is dropped.
        """
        if self.done:
            return ""
        if self._is_inside_key():
            del self._out[self._key_begin :]
        elif self._state == self._scan_string:
            self._out.append('"')
        elif not self._stack:
            self._out.append("{}")
        self._out += [JSON_OUTPUT_CLOSERS[bracket] for bracket in reversed(self._stack)]
        self.done = True
        return super().drain_json()

    def take_key_without_value(self) -> str:
        """Return the key whose value did not come before a limit."""
        return super().drain_json()

    def drain_json(self) -> str:
        """Return the JSON since the last call, up to a key without a value."""
        if not self._is_inside_key():
            return super().drain_json()
        if not self._key_begin:
            return ""
        key = self._out[self._key_begin :]
        del self._out[self._key_begin :]
        text = super().drain_json()
        self._out, self._key_begin = key, 0
        return text

    def _is_inside_key(self) -> bool:
        """Whether a key has begun, but not its value."""
        if self._state == self._scan_string:
            return self._is_key
        return self._state in (self._scan_colon, self._scan_member_value)

    def _open_string(self, quote: str, is_key: bool) -> None:
        if is_key:
            self._key_begin = len(self._out)
        super()._open_string(quote, is_key)

    def _normalize_number(self, run: str) -> str:
        return clamp_number_to_double(run)

    def _scan_escape(self, text: str, at: int) -> int:
        match = _SURROGATE_ESCAPE.match(text, at)
        if match is None:
            return super()._scan_escape(text, at)
        if match["pair"]:
            self._write_string_part(match[0])
        elif match["high"] and _PARTIAL_LOW_SURROGATE.fullmatch(text, match.end()):
            return at
        else:
            self._write_string_part(_REPLACEMENT)
        return match.end()
