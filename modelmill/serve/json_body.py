"""JSON of any size that a request may have, read so that other threads go on meanwhile.

``json.loads`` keeps the interpreter to itself until it is done: a large text is given to it in pieces, each of few
values and bytes, along the structure that ``json_scan`` found. What comes out is what ``json.loads`` would give.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelmill.serve.json_scan import CLOSE, COLON, COMMA, OPEN, Bounds, NotJson, Structure, TooMuch, scan

PIECE_PLACES, PIECE_BYTES = 4096, 64 << 10
"""Most brackets, commas and colons, and most bytes, that are read at once: a millisecond or two."""
MAX_TEXT_BYTES = 4 << 20
"""Of one string that is not ASCII: it takes up to four bytes a character. A picture's base64 is ASCII."""
_KEPT_INTEGERS = 4096
_LONGEST_UNIT = 12
"""Bytes of the longest character in a string: two escapes that are one."""
_BOM = b"\xef\xbb\xbf"


class BodyError(ValueError):
    """A text that is not read. field: of the object that it is, where one is at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def parse(data: bytes | bytearray, bounds: Bounds | None = None) -> Any:
    """The value of a JSON text in UTF-8. Raises BodyError: it is none, or has more in it than ``bounds`` allow."""
    try:
        return _Reader(data, scan(data, bounds or Bounds())).whole()
    except TooMuch as error:
        raise BodyError(str(error), _name(data, error.key)) from None
    except (NotJson, json.JSONDecodeError, UnicodeDecodeError):
        raise BodyError("is not JSON") from None
    except (ValueError, RecursionError) as error:
        said = str(error) if isinstance(error, _TooLong) else "cannot be read as JSON"
        raise BodyError(said) from None


def _name(data: bytes | bytearray, key: slice | None) -> str | None:
    """The key that stands there, if it is a short one."""
    if key is None or key.stop - key.start > 100:
        return None
    try:
        found = json.loads(bytes(data[key]))
    except ValueError:
        return None
    return found if isinstance(found, str) and found.isprintable() else None


class _TooLong(ValueError):
    """A string of more characters than may be."""


@dataclass(frozen=True)
class _Span:
    """begin, end: bytes. first, last: of the structure's places. count: of values side by side."""

    begin: int
    end: int
    first: int
    last: int
    count: int = 1

    @property
    def small(self) -> bool:
        return self.last - self.first <= PIECE_PLACES and self.end - self.begin <= PIECE_BYTES


class _Reader:
    """Makes values of a text."""

    def __init__(self, data: bytes | bytearray, structure: Structure) -> None:
        self._data, self._places = data, structure.places
        self._classes, self._depths = structure.classes, structure.depths
        self._loads = json.JSONDecoder().decode
        self._integers: dict[int, int] = {}

    def whole(self) -> Any:
        """The text's value."""
        begin = len(_BOM) if self._data.startswith(_BOM) else 0
        return self._value(_Span(begin, len(self._data), 0, len(self._places)))

    def _decoded(self, begin: int, end: int) -> str:
        return self._data[begin:end].decode("utf-8", "surrogatepass")

    def _value(self, span: _Span) -> Any:
        if not span.small:
            span = self._stripped(span)
        if span.small:
            return self._loads(self._decoded(span.begin, span.end))
        if span.first == span.last:
            return self._text(span.begin, span.end)
        self._check_brackets(span)
        inner = _Span(span.begin + 1, span.end - 1, span.first + 1, span.last - 1)
        return self._object(inner) if self._data[span.begin] == ord("{") else self._list(inner)

    def _check_brackets(self, span: _Span) -> None:
        """Raises NotJson unless one pair of brackets is around all of it."""
        first, last = span.first, span.last - 1
        depths, classes = self._depths, self._classes
        around = self._places[first] == span.begin and self._places[last] == span.end - 1
        pair = bytes((self._data[span.begin], self._data[span.end - 1])) in (b"[]", b"{}")
        if not (around and pair and classes[first] == OPEN and classes[last] == CLOSE):
            raise NotJson("no brackets")
        if depths[last] != depths[first] - 1 or int(depths[first:last].min()) < depths[first]:
            raise NotJson("brackets that close too early")

    def _stripped(self, span: _Span) -> _Span:
        """Without the white space around it."""
        begin, end = span.begin, span.end
        while begin < end:
            piece = self._data[begin : min(begin + PIECE_BYTES, end)]
            begin += len(piece) - len(piece.lstrip(b" \t\n\r"))
            if piece.strip(b" \t\n\r"):
                break
        while begin < end:
            piece = self._data[max(end - PIECE_BYTES, begin) : end]
            end -= len(piece) - len(piece.rstrip(b" \t\n\r"))
            if piece.strip(b" \t\n\r"):
                break
        return _Span(begin, end, span.first, span.last)

    def _groups(self, span: _Span) -> Iterator[_Span]:
        """What stands between the commas of a list or an object, as much together as may be read at once."""
        depth = int(self._depths[span.first - 1])
        part = slice(span.first, span.last)
        commas = span.first + np.flatnonzero((self._classes[part] == COMMA) & (self._depths[part] == depth))
        ends = np.append(self._places[commas].astype(np.int64), span.end)
        lasts = np.append(commas, span.last)
        begin, first, done = span.begin, span.first, 0
        while done < len(ends):
            most = min(
                np.searchsorted(lasts, first + PIECE_PLACES, "right"),
                np.searchsorted(ends, begin + PIECE_BYTES, "right"),
            )
            upto = max(int(most), done + 1)
            end, last = int(ends[upto - 1]), int(lasts[upto - 1])
            yield _Span(begin, end, first, last, upto - done)
            begin, first, done = end + 1, last + 1, upto

    def _list(self, span: _Span) -> list[Any]:
        out: list[Any] = []
        if span.first == span.last and self._blank(span):
            return out
        for group in self._groups(span):
            if group.count == 1:
                out.append(self._value(group))
                continue
            values = self._loads(f"[{self._decoded(group.begin, group.end)}]")
            if len(values) != group.count:
                raise NotJson("other brackets than were seen")
            out += self._shared(values)
        return out

    def _shared(self, values: list[Any]) -> Iterable[Any]:
        """The values, equal integers as one object: a list of token ids has many, and each takes 28 bytes."""
        if not set(map(type, values)) <= {int}:
            return values
        if len(self._integers) > _KEPT_INTEGERS:
            self._integers.clear()
        return map(self._integers.setdefault, values, values)

    def _object(self, span: _Span) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if span.first == span.last and self._blank(span):
            return out
        for group in self._groups(span):
            if group.small and not self._blank(group):
                out.update(self._loads(f"{{{self._decoded(group.begin, group.end)}}}"))
                continue
            colon = group.first
            if group.first == group.last or self._classes[colon] != COLON:
                raise NotJson("no key")
            place = int(self._places[colon])
            key = self._value(_Span(group.begin, place, colon, colon))
            if not isinstance(key, str):
                raise NotJson("no key")
            out[key] = self._value(_Span(place + 1, group.end, colon + 1, group.last))
        return out

    def _blank(self, span: _Span) -> bool:
        found = self._stripped(span)
        return found.begin == found.end

    def _text(self, begin: int, end: int) -> str:
        """A long string, in pieces that end between two characters."""
        if self._data[begin] != ord('"') or self._data[end - 1] != ord('"') or end - begin < 2:
            raise ValueError("a number without end")
        parts: list[str] = []
        at, end, wide = begin + 1, end - 1, False
        while at < end:
            part, at = self._piece(at, end)
            wide = wide or not part.isascii()
            if wide and end - begin > MAX_TEXT_BYTES:
                raise _TooLong(f"holds a text of more than {MAX_TEXT_BYTES} bytes")
            parts.append(part)
        return "".join(parts)

    def _piece(self, at: int, end: int) -> tuple[str, int]:
        """A piece of a string, and where the next one begins. Raises NotJson."""
        stop = min(at + PIECE_BYTES, end)
        for cut in range(stop, max(stop - _LONGEST_UNIT, at), -1):
            try:
                text = self._loads(f'"{self._decoded(at, cut)}"')
            except ValueError:
                if stop == end:
                    break
                continue  # in the middle of a character
            follows = self._data[cut : cut + 4].lower()
            if cut < end and "\ud800" <= text[-1] <= "\udbff" and follows[:3] == b"\\ud" and follows[3:] in b"cdef":
                continue  # the other half of a pair
            return text, cut
        raise NotJson("no string")
