"""Where the structure of a JSON text lies, and how much memory its values would take: known before
any value is made.

The text is looked at in slices with numpy, which lets other threads go on; nothing is made of it
but positions of brackets, commas and colons, and no more of them than ``JsonLimits`` allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SLICE_BYTES = 128 << 10
"""Bytes that are looked at together."""
NONE, OPEN, CLOSE, COMMA, COLON, QUOTE, BACKSLASH = range(7)
_CLASSES = np.zeros(256, np.uint8)
for _chars, _class in (
    (b"{[", OPEN),
    (b"}]", CLOSE),
    (b",", COMMA),
    (b":", COLON),
    (b'"', QUOTE),
    (b"\\", BACKSLASH),
):
    _CLASSES[list(_chars)] = _class
OBJECT_BYTES, LIST_BYTES, STRING_BYTES, VALUE_BYTES = 240, 96, 64, 24
"""What CPython takes for a small one of each, about, with its place in what holds it; equal
integers are one object.
"""
SHARED_KEYS, KEY_BYTES = 8, 120
"""Keys of an object that are taken for names, which objects share; what each further one takes."""


class JsonLimitExceeded(ValueError):
    """A text with more structure than may be.

    key: where the last key of the outermost object stands.
    """

    def __init__(self, message: str, key: slice | None = None) -> None:
        super().__init__(message)
        self.key = key


class InvalidJson(ValueError):
    """A text that is none."""


@dataclass(frozen=True)
class JsonLimits:
    """max_depth: of nesting. Values may take max_growth x the text's bytes, or min_memory_bytes."""

    max_values: int = 1 << 18
    max_depth: int = 256
    max_growth: int = 8
    min_memory_bytes: int = 4 << 20


@dataclass(frozen=True)
class Structure:
    """positions [S] uint32: of brackets, commas and colons outside strings; char_classes [S] uint8;
    depths [S]
    int16: how deep the text is behind each of them.
    """

    positions: np.ndarray
    char_classes: np.ndarray
    depths: np.ndarray


def scan(data: bytes | bytearray, limits: JsonLimits) -> Structure:
    """The structure of a JSON text.

    Raises JsonLimitExceeded; InvalidJson for some of what cannot be JSON.
    """
    found = _Scanner(data, limits)
    for begin in range(0, len(data), SLICE_BYTES):
        found.scan_slice(begin)
    return found.finish()


class _Scanner:
    """The state between two slices."""

    def __init__(self, data: bytes | bytearray, limits: JsonLimits) -> None:
        self._raw = np.frombuffer(data, np.uint8)
        self._limits = limits
        self._max_memory = max(limits.min_memory_bytes, limits.max_growth * len(data))
        self._in_string = False  # a string
        self._escaped = False  # the next byte
        self._depth = self._values = self._memory = self._num_key_names = 0
        self._last_position = -1  # the last place of the slices before
        self._key: slice | None = None
        self._slices: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def scan_slice(self, begin: int) -> None:
        """One slice."""
        raw = self._raw[begin : begin + SLICE_BYTES]
        classes = _CLASSES[raw]
        at = np.flatnonzero(classes)
        kinds = classes[at]
        quotes = self._find_quotes(at, kinds, len(raw))
        outside = (kinds >= OPEN) & (kinds <= COLON)
        at, kinds = at[outside], kinds[outside]
        # behind an odd number of quotes is inside
        free = (np.searchsorted(quotes, at) + self._in_string) % 2 == 0
        self._in_string ^= bool(len(quotes) % 2)
        self._record(begin, raw, at[free], kinds[free], len(quotes))

    def _find_quotes(self, positions: np.ndarray, classes: np.ndarray, length: int) -> np.ndarray:
        """Places of the quotes that no backslash takes the meaning from."""
        quotes, slashes = positions[classes == QUOTE], positions[classes == BACKSLASH]
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

    def _record(
        self,
        begin: int,
        raw: np.ndarray,
        positions: np.ndarray,
        classes: np.ndarray,
        num_quotes: int,
    ) -> None:
        steps = (classes == OPEN).astype(np.int32) - (classes == CLOSE)
        depths = self._depth + np.cumsum(steps, dtype=np.int32)
        opened, commas = (
            int(np.count_nonzero(classes == OPEN)),
            int(np.count_nonzero(classes == COMMA)),
        )
        objects = int(np.count_nonzero(raw[positions[classes == OPEN]] == ord("{")))
        colons = int(np.count_nonzero(classes == COLON))
        self._values += opened + commas
        self._memory += (
            OBJECT_BYTES * objects + LIST_BYTES * (opened - objects) + VALUE_BYTES * commas
        )
        self._memory += STRING_BYTES * max((num_quotes + 1) // 2 - colons, 0)
        self._num_key_names += SHARED_KEYS * objects - colons
        if len(positions):
            self._check(begin, positions, classes, depths)
            self._depth = int(depths[-1])
        self._slices.append(
            ((positions + begin).astype(np.uint32), classes, depths.astype(np.int16))
        )

    def _check(
        self, begin: int, positions: np.ndarray, classes: np.ndarray, depths: np.ndarray
    ) -> None:
        bounds, last = self._limits, len(positions)
        if int(depths.min()) < 0:
            raise InvalidJson("a bracket closes nothing")
        message = None
        if int(depths.max()) > bounds.max_depth:
            last = int(np.argmax(depths > bounds.max_depth))
            message = f"is nested more than {bounds.max_depth} deep"
        elif self._values > bounds.max_values:
            message = f"holds more than {bounds.max_values} values"
        elif self._memory + KEY_BYTES * max(-self._num_key_names, 0) > self._max_memory:
            message = "holds too many small lists, objects and texts for its size"
        keys = [self._key]
        colons = np.flatnonzero((classes[:last] == COLON) & (depths[:last] == 1))
        # all of them where one is at fault: it is the one with the most in it, of this slice
        for colon in map(int, colons if message else colons[-1:]):
            before = begin + int(positions[colon - 1]) if colon else self._last_position
            keys.append(slice(before + 1, begin + int(positions[colon])))
        if message is not None:
            sizes = np.diff(np.concatenate(([0], colons, [last])))
            raise JsonLimitExceeded(message, keys[int(np.argmax(sizes))])
        self._key, self._last_position = keys[-1], begin + int(positions[-1])

    def finish(self) -> Structure:
        """All of it."""
        if self._depth or self._in_string:
            raise InvalidJson("the text ends too early")
        if not self._slices:
            return Structure(np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.int16))
        places, classes, depths = (np.concatenate(parts) for parts in zip(*self._slices))
        return Structure(places, classes, depths)
