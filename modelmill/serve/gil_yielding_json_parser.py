"""Parses JSON of any size without blocking other threads for long.

``json.loads`` holds the GIL until it is done. A large text is therefore parsed in pieces of few
values and bytes, along the structure that ``json_scan`` found. The result equals that of
``json.loads``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from modelmill.serve.json_scan import (
    CLOSE_BRACKET_CLASS,
    COLON_CLASS,
    COMMA_CLASS,
    OPEN_BRACKET_CLASS,
    InvalidJson,
    JsonLimitExceeded,
    JsonLimits,
    JsonStructure,
    scan_structure,
)

MAX_CHUNK_STRUCTURALS, MAX_CHUNK_BYTES = 4096, 64 << 10
"""Limits of one piece: brackets, commas and colons, and bytes; a millisecond or two."""
MAX_NON_ASCII_STRING_BYTES = 4 << 20
"""Limit of one string that is not ASCII: it takes up to four bytes per character.

The base64 of an image is ASCII.
"""
YIELD_AFTER_SECONDS, YIELD_SECONDS = 0.001, 5e-5
"""Seconds of decoding after which the GIL is released, and for how long at least.

Python's own switch (``sys.setswitchinterval``) is not enough: NumPy releases the GIL for so short
moments that a waiting thread wakes too late, and each release restarts that thread's waiting time.
It waited 0.2 s.
"""
_MAX_INTERNED_INTS = 4096
_MAX_ESCAPED_CHAR_BYTES = 12
"""Bytes of the longest character in a string: an escaped surrogate pair."""
_BOM = b"\xef\xbb\xbf"


class JsonParseError(ValueError):
    """The text is not valid JSON or exceeds a limit.

    Attributes:
        field: key of the outermost object whose value is wrong, if known.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def parse_json(
    data: bytes | bytearray,
    limits: JsonLimits | None = None,
    unused: Mapping[str, int] | None = None,
) -> Any:
    """Parse a JSON text in UTF-8.

    Args:
        data: the text.
        limits: of its structure.
        unused: key → depth; long lists under such a key at that depth are checked, but not stored.

    Raises:
        JsonParseError: the text is not JSON or exceeds ``limits``.
    """
    try:
        return _JsonDecoder(
            data, scan_structure(data, limits or JsonLimits()), unused or {}
        ).decode()
    except JsonLimitExceeded as error:
        raise JsonParseError(str(error), _decode_printable_key(data, error.key)) from None
    except (InvalidJson, json.JSONDecodeError, UnicodeDecodeError):
        raise JsonParseError("is not JSON") from None
    except (ValueError, RecursionError) as error:
        message = str(error) if isinstance(error, _StringTooLong) else "cannot be read as JSON"
        raise JsonParseError(message) from None


def _decode_printable_key(data: bytes | bytearray, key: slice | None) -> str | None:
    """The key at ``key``, if it is short and printable."""
    if key is None or key.stop - key.start > 100:
        return None
    try:
        name = json.loads(bytes(data[key]))
    except ValueError:
        return None
    return name if isinstance(name, str) and name.isprintable() else None


class _StringTooLong(ValueError):
    """A string has too many characters."""


@dataclass(frozen=True)
class _JsonSpan:
    """A part of the text.

    Attributes:
        begin: first byte.
        end: byte after the last.
        first: index of its first structural character in ``JsonStructure``.
        last: index after its last one.
        count: number of values, separated by commas.
    """

    begin: int
    end: int
    first: int
    last: int
    count: int = 1


def _is_small(span: _JsonSpan) -> bool:
    """Whether the span is decoded at once."""
    return (
        span.last - span.first <= MAX_CHUNK_STRUCTURALS and span.end - span.begin <= MAX_CHUNK_BYTES
    )


class _JsonDecoder:
    """Decodes values of a text."""

    def __init__(
        self, data: bytes | bytearray, structure: JsonStructure, unused: Mapping[str, int]
    ) -> None:
        self._unused = unused
        self._data, self._positions = data, structure.positions
        self._char_classes, self._depths = structure.char_classes, structure.depths
        self._json = json.JSONDecoder()
        self._yielded_at = time.perf_counter()
        self._interned_ints: dict[int, int] = {}

    def decode(self) -> Any:
        """Decode the whole text."""
        begin = len(_BOM) if self._data.startswith(_BOM) else 0
        return self._decode_value(_JsonSpan(begin, len(self._data), 0, len(self._positions)))

    def _decode_yielding_gil(self, text: str) -> Any:
        """Decode a short text, and release the GIL from time to time."""
        if time.perf_counter() - self._yielded_at > YIELD_AFTER_SECONDS:
            time.sleep(YIELD_SECONDS)
            self._yielded_at = time.perf_counter()
        return self._json.decode(text)

    def _decode_utf8(self, begin: int, end: int) -> str:
        return self._data[begin:end].decode("utf-8", "surrogatepass")

    def _decode_value(self, span: _JsonSpan) -> Any:
        if not _is_small(span):
            span = self._strip_whitespace(span)
        if _is_small(span):
            return self._decode_yielding_gil(self._decode_utf8(span.begin, span.end))
        if span.first == span.last:
            return self._decode_string(span.begin, span.end)
        self._check_brackets(span)
        inner = _JsonSpan(span.begin + 1, span.end - 1, span.first + 1, span.last - 1)
        return (
            self._decode_object(inner)
            if self._data[span.begin] == ord("{")
            else self._decode_list(inner)
        )

    def _check_brackets(self, span: _JsonSpan) -> None:
        """Raise InvalidJson unless one pair of brackets encloses the whole span."""
        first, last = span.first, span.last - 1
        depths, classes = self._depths, self._char_classes
        encloses = self._positions[first] == span.begin and self._positions[last] == span.end - 1
        matches = bytes((self._data[span.begin], self._data[span.end - 1])) in (b"[]", b"{}")
        if not (
            encloses
            and matches
            and classes[first] == OPEN_BRACKET_CLASS
            and classes[last] == CLOSE_BRACKET_CLASS
        ):
            raise InvalidJson("no brackets")
        if depths[last] != depths[first] - 1 or int(depths[first:last].min()) < depths[first]:
            raise InvalidJson("brackets that close too early")

    def _strip_whitespace(self, span: _JsonSpan) -> _JsonSpan:
        """The span without surrounding white space."""
        begin, end = span.begin, span.end
        while begin < end:
            chunk = self._data[begin : min(begin + MAX_CHUNK_BYTES, end)]
            begin += len(chunk) - len(chunk.lstrip(b" \t\n\r"))
            if chunk.strip(b" \t\n\r"):
                break
        while begin < end:
            chunk = self._data[max(end - MAX_CHUNK_BYTES, begin) : end]
            end -= len(chunk) - len(chunk.rstrip(b" \t\n\r"))
            if chunk.strip(b" \t\n\r"):
                break
        return _JsonSpan(begin, end, span.first, span.last)

    def _split_chunks(self, span: _JsonSpan) -> Iterator[_JsonSpan]:
        """Split a list or an object at its commas, into pieces as large as the limits allow."""
        depth = int(self._depths[span.first - 1])
        part = slice(span.first, span.last)
        commas = span.first + np.flatnonzero(
            (self._char_classes[part] == COMMA_CLASS) & (self._depths[part] == depth)
        )
        ends = np.append(self._positions[commas].astype(np.int64), span.end)
        lasts = np.append(commas, span.last)
        begin, first, done = span.begin, span.first, 0
        while done < len(ends):
            limit = min(
                np.searchsorted(lasts, first + MAX_CHUNK_STRUCTURALS, "right"),
                np.searchsorted(ends, begin + MAX_CHUNK_BYTES, "right"),
            )
            end_index = max(int(limit), done + 1)
            end, last = int(ends[end_index - 1]), int(lasts[end_index - 1])
            yield _JsonSpan(begin, end, first, last, end_index - done)
            begin, first, done = end + 1, last + 1, end_index

    def _decode_list(self, span: _JsonSpan) -> list[Any]:
        return list(chain.from_iterable(self._iter_list_values(span)))

    def _iter_list_values(self, span: _JsonSpan) -> Iterator[Iterable[Any]]:
        """Yield the values of a list, in groups."""
        if span.first == span.last and self._is_blank(span):
            return
        for group in self._split_chunks(span):
            if group.count == 1:
                yield [self._decode_value(group)]
                continue
            values = self._decode_yielding_gil(f"[{self._decode_utf8(group.begin, group.end)}]")
            if len(values) != group.count:
                raise InvalidJson("the brackets do not match")
            yield self._intern_integers(values)

    def _intern_integers(self, values: list[Any]) -> Iterable[Any]:
        """Return the values, with equal integers as one object.

        A list of token ids has many equal ones, and each takes 28 bytes.
        """
        if not set(map(type, values)) <= {int}:
            return values
        if len(self._interned_ints) > _MAX_INTERNED_INTS:
            self._interned_ints.clear()
        return map(self._interned_ints.setdefault, values, values)

    def _decode_object(self, span: _JsonSpan) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if span.first == span.last and self._is_blank(span):
            return out
        for group in self._split_chunks(span):
            if _is_small(group) and not self._is_blank(group):
                out.update(
                    self._decode_yielding_gil(f"{{{self._decode_utf8(group.begin, group.end)}}}")
                )
                continue
            colon = group.first
            if group.first == group.last or self._char_classes[colon] != COLON_CLASS:
                raise InvalidJson("no key")
            place = int(self._positions[colon])
            key = self._decode_value(_JsonSpan(group.begin, place, colon, colon))
            if not isinstance(key, str):
                raise InvalidJson("no key")
            out[key] = self._decode_member_value(
                key, _JsonSpan(place + 1, group.end, colon + 1, group.last)
            )
        return out

    def _decode_member_value(self, key: str, span: _JsonSpan) -> Any:
        """Decode the value of a key."""
        if self._unused.get(key) == self._depths[span.first - 1] and not _is_small(span):
            span = self._strip_whitespace(span)
            if self._data[span.begin] == ord("["):
                self._check_brackets(span)
                for _ in self._iter_list_values(
                    _JsonSpan(span.begin + 1, span.end - 1, span.first + 1, span.last - 1)
                ):
                    # not stored: freeing so many objects, and collecting garbage, takes long
                    pass
                return []
        return self._decode_value(span)

    def _is_blank(self, span: _JsonSpan) -> bool:
        stripped = self._strip_whitespace(span)
        return stripped.begin == stripped.end

    def _decode_string(self, begin: int, end: int) -> str:
        """Decode a long string, in pieces that end between two characters."""
        if self._data[begin] != ord('"') or self._data[end - 1] != ord('"') or end - begin < 2:
            raise ValueError("a number that is too long")
        parts: list[str] = []
        at, end, wide = begin + 1, end - 1, False
        while at < end:
            part, at = self._decode_string_chunk(at, end)
            wide = wide or not part.isascii()
            if wide and end - begin > MAX_NON_ASCII_STRING_BYTES:
                raise _StringTooLong(
                    f"has a string of more than {MAX_NON_ASCII_STRING_BYTES} bytes"
                )
            parts.append(part)
        return "".join(parts)

    def _decode_string_chunk(self, at: int, end: int) -> tuple[str, int]:
        """Decode a piece of a string; return it and the start of the next one.

        Raises:
            InvalidJson: it is not a valid string.
        """
        stop = min(at + MAX_CHUNK_BYTES, end)
        for cut in range(stop, max(stop - _MAX_ESCAPED_CHAR_BYTES, at), -1):
            try:
                text = self._decode_yielding_gil(f'"{self._decode_utf8(at, cut)}"')
            except ValueError:
                if stop == end:
                    break
                continue  # in the middle of a character
            follows = self._data[cut : cut + 4].lower()
            if (
                cut < end
                and "\ud800" <= text[-1] <= "\udbff"
                and follows[:3] == b"\\ud"
                and follows[3:] in b"cdef"
            ):
                continue  # between the halves of a surrogate pair
            return text, cut
        raise InvalidJson("no string")
