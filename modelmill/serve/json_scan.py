"""Where the structure of a JSON text lies, and how much memory its values would take: known before any value is made.

The text is looked at in slices with numpy, which lets other threads go on; nothing is made of it but positions of
brackets, commas and colons, and no more of them than ``Bounds`` allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SLICE = 128 << 10
"""Bytes that are looked at together."""
NONE, OPEN, CLOSE, COMMA, COLON, QUOTE, BACKSLASH = range(7)
_CLASSES = np.zeros(256, np.uint8)
for _chars, _class in ((b"{[", OPEN), (b"}]", CLOSE), (b",", COMMA), (b":", COLON), (b'"', QUOTE), (b"\\", BACKSLASH)):
    _CLASSES[list(_chars)] = _class
OBJECT_BYTES, LIST_BYTES, STRING_BYTES, VALUE_BYTES = 240, 96, 64, 24
"""What CPython takes for a small one of each, about, with its place in what holds it; equal integers are one object."""
KEYS, KEY_BYTES = 8, 120
"""Keys of an object that are taken for names, which objects share; what each further one takes."""


class TooMuch(ValueError):
    """A text with more structure than may be. key: where the last key of the outermost object stands."""

    def __init__(self, message: str, key: slice | None = None) -> None:
        super().__init__(message)
        self.key = key


class NotJson(ValueError):
    """A text that is none."""


@dataclass(frozen=True)
class Bounds:
    """values: in all. depth: of nesting. growth, free: values may take growth x the text's bytes, or so many bytes."""

    values: int = 1 << 18
    depth: int = 256
    growth: int = 8
    free: int = 4 << 20


@dataclass(frozen=True)
class Structure:
    """places [S] uint32: of brackets, commas and colons outside strings; classes [S] uint8; depths [S] int16: how deep
    the text is behind each of them.
    """

    places: np.ndarray
    classes: np.ndarray
    depths: np.ndarray


def scan(data: bytes | bytearray, bounds: Bounds) -> Structure:
    """The structure of a JSON text. Raises TooMuch; NotJson for some of what cannot be JSON."""
    found = _Scan(data, bounds)
    for begin in range(0, len(data), SLICE):
        found.take(begin)
    return found.end()


class _Scan:
    """The state between two slices."""

    def __init__(self, data: bytes | bytearray, bounds: Bounds) -> None:
        self._raw = np.frombuffer(data, np.uint8)
        self._bounds = bounds
        self._most = max(bounds.free, bounds.growth * len(data))
        self._inside = False  # a string
        self._escaped = False  # the next byte
        self._depth = self._values = self._memory = self._names = 0
        self._before = -1  # the last place of the slices before
        self._key: slice | None = None
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def take(self, begin: int) -> None:
        """One slice."""
        raw = self._raw[begin : begin + SLICE]
        classes = _CLASSES[raw]
        at = np.flatnonzero(classes)
        kinds = classes[at]
        quotes = self._quotes(at, kinds, len(raw))
        outside = (kinds >= OPEN) & (kinds <= COLON)
        at, kinds = at[outside], kinds[outside]
        # behind an odd number of quotes is inside
        free = (np.searchsorted(quotes, at) + self._inside) % 2 == 0
        self._inside ^= bool(len(quotes) % 2)
        self._note(begin, raw, at[free], kinds[free], len(quotes))

    def _quotes(self, at: np.ndarray, kinds: np.ndarray, length: int) -> np.ndarray:
        """Places of the quotes that no backslash takes the meaning from."""
        quotes, slashes = at[kinds == QUOTE], at[kinds == BACKSLASH]
        taken = self._escaped
        if taken and len(quotes) and quotes[0] == 0:
            quotes = quotes[1:]
        if taken and len(slashes) and slashes[0] == 0:
            slashes = slashes[1:]
        self._escaped = False
        if not len(slashes):
            return quotes
        # a run of backslashes of odd length takes the meaning from what follows it
        breaks = np.flatnonzero(np.diff(slashes) != 1)
        first = slashes[np.concatenate(([0], breaks + 1))]
        behind = slashes[np.concatenate((breaks, [len(slashes) - 1]))] + 1
        escaped = behind[(behind - first) % 2 == 1]
        self._escaped = bool(len(escaped) and escaped[-1] == length)
        return quotes[~np.isin(quotes, escaped, assume_unique=True)]

    def _note(self, begin: int, raw: np.ndarray, at: np.ndarray, kinds: np.ndarray, quotes: int) -> None:
        steps = (kinds == OPEN).astype(np.int32) - (kinds == CLOSE)
        depths = self._depth + np.cumsum(steps, dtype=np.int32)
        opened, commas = int(np.count_nonzero(kinds == OPEN)), int(np.count_nonzero(kinds == COMMA))
        objects = int(np.count_nonzero(raw[at[kinds == OPEN]] == ord("{")))
        colons = int(np.count_nonzero(kinds == COLON))
        self._values += opened + commas
        self._memory += OBJECT_BYTES * objects + LIST_BYTES * (opened - objects) + VALUE_BYTES * commas
        self._memory += STRING_BYTES * max((quotes + 1) // 2 - colons, 0)
        self._names += KEYS * objects - colons
        if len(at):
            self._check(begin, at, kinds, depths)
            self._depth = int(depths[-1])
        self._parts.append(((at + begin).astype(np.uint32), kinds, depths.astype(np.int16)))

    def _check(self, begin: int, at: np.ndarray, kinds: np.ndarray, depths: np.ndarray) -> None:
        bounds, last = self._bounds, len(at)
        if int(depths.min()) < 0:
            raise NotJson("a bracket closes nothing")
        message = None
        if int(depths.max()) > bounds.depth:
            last = int(np.argmax(depths > bounds.depth))
            message = f"is nested more than {bounds.depth} deep"
        elif self._values > bounds.values:
            message = f"holds more than {bounds.values} values"
        elif self._memory + KEY_BYTES * max(-self._names, 0) > self._most:
            message = "holds too many small lists, objects and texts for its size"
        keys = [self._key]
        colons = np.flatnonzero((kinds[:last] == COLON) & (depths[:last] == 1))
        # all of them where one is at fault: it is the one with the most in it, of this slice
        for colon in map(int, colons if message else colons[-1:]):
            before = begin + int(at[colon - 1]) if colon else self._before
            keys.append(slice(before + 1, begin + int(at[colon])))
        if message is not None:
            sizes = np.diff(np.concatenate(([0], colons, [last])))
            raise TooMuch(message, keys[int(np.argmax(sizes))])
        self._key, self._before = keys[-1], begin + int(at[-1])

    def end(self) -> Structure:
        """All of it."""
        if self._depth or self._inside:
            raise NotJson("the text ends too early")
        if not self._parts:
            return Structure(np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.int16))
        places, classes, depths = (np.concatenate(parts) for parts in zip(*self._parts))
        return Structure(places, classes, depths)
