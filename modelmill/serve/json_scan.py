"""Finds the structure of a JSON text and estimates the memory of its values, before decoding any.

The text is scanned in slices with numpy, which releases the GIL. Only the positions of brackets,
commas and colons are stored, and no more of them than ``JsonLimits`` allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SLICE_BYTES = 128 << 10
"""Bytes scanned at a time."""
(
    NON_STRUCTURAL_CLASS,
    OPEN_BRACKET_CLASS,
    CLOSE_BRACKET_CLASS,
    COMMA_CLASS,
    COLON_CLASS,
    QUOTE_CLASS,
    BACKSLASH_CLASS,
) = range(7)
_BYTE_CLASSES = np.zeros(256, np.uint8)
for _chars, _class in (
    (b"{[", OPEN_BRACKET_CLASS),
    (b"}]", CLOSE_BRACKET_CLASS),
    (b",", COMMA_CLASS),
    (b":", COLON_CLASS),
    (b'"', QUOTE_CLASS),
    (b"\\", BACKSLASH_CLASS),
):
    _BYTE_CLASSES[list(_chars)] = _class
BYTES_PER_OBJECT = 240
BYTES_PER_LIST = 96
BYTES_PER_STRING = 64
BYTES_PER_VALUE = 24
"""Approximate memory in CPython of a small object of each type, with its reference in the
container.

Equal integers are one object.
"""
SHARED_KEYS_PER_OBJECT, DISTINCT_KEY_BYTES = 8, 120
"""Keys per object that count as field names, shared by objects; memory of each further key."""


class JsonLimitExceeded(ValueError):
    """The text exceeds a limit.

    Attributes:
        key: position of the key of the outermost object whose value is too large.
    """

    def __init__(self, message: str, key: slice | None = None) -> None:
        super().__init__(message)
        self.key = key


class InvalidJson(ValueError):
    """The text is not valid JSON."""


@dataclass(frozen=True)
class JsonLimits:
    """Limits of a JSON text.

    Attributes:
        max_values: number of values.
        max_depth: depth of nesting.
        max_growth: memory of the values, as a multiple of the text's bytes.
        min_memory_bytes: memory that is always allowed.
    """

    max_values: int = 1 << 18
    max_depth: int = 256
    max_growth: int = 8
    min_memory_bytes: int = 4 << 20


@dataclass(frozen=True)
class JsonStructure:
    """Structural characters outside strings: brackets, commas and colons.

    Attributes:
        positions: [S] uint32, byte offsets.
        char_classes: [S] uint8.
        depths: [S] int16, depth of nesting after each.
    """

    positions: np.ndarray
    char_classes: np.ndarray
    depths: np.ndarray


def scan_structure(data: bytes | bytearray, limits: JsonLimits) -> JsonStructure:
    """Find the structure of a JSON text.

    Raises:
        JsonLimitExceeded: it exceeds ``limits``.
        InvalidJson: it is not JSON; not every error is found.
    """
    scanner = _StructureScanner(data, limits)
    for begin in range(0, len(data), SLICE_BYTES):
        scanner.scan_slice(begin)
    return scanner.finish_scan()


class _StructureScanner:
    """State between two slices."""

    def __init__(self, data: bytes | bytearray, limits: JsonLimits) -> None:
        self._raw = np.frombuffer(data, np.uint8)
        self._limits = limits
        self._max_memory = max(limits.min_memory_bytes, limits.max_growth * len(data))
        self._in_string = False  # the slice begins inside a string
        self._escaped = False  # the next byte is escaped
        self._depth = self._values = self._memory = self._num_key_names = 0
        self._last_position = -1  # last position of the previous slices
        self._key: slice | None = None
        self._slices: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def scan_slice(self, begin: int) -> None:
        """Scan one slice of the body."""
        raw = self._raw[begin : begin + SLICE_BYTES]
        classes = _BYTE_CLASSES[raw]
        positions = np.flatnonzero(classes)
        classes_at = classes[positions]
        quotes = self._find_unescaped_quotes(positions, classes_at, len(raw))
        outside = (classes_at >= OPEN_BRACKET_CLASS) & (classes_at <= COLON_CLASS)
        positions, classes_at = positions[outside], classes_at[outside]
        # after an odd number of quotes: inside a string
        is_structural = (np.searchsorted(quotes, positions) + self._in_string) % 2 == 0
        self._in_string ^= bool(len(quotes) % 2)
        self._record_slice(
            begin, raw, positions[is_structural], classes_at[is_structural], len(quotes)
        )

    def _find_unescaped_quotes(
        self, positions: np.ndarray, classes: np.ndarray, length: int
    ) -> np.ndarray:
        """Positions of the quotes that are not escaped."""
        quotes, slashes = positions[classes == QUOTE_CLASS], positions[classes == BACKSLASH_CLASS]
        starts_escaped = self._escaped
        if starts_escaped and len(quotes) and quotes[0] == 0:
            quotes = quotes[1:]
        if starts_escaped and len(slashes) and slashes[0] == 0:
            slashes = slashes[1:]
        self._escaped = False
        if not len(slashes):
            return quotes
        # a run of backslashes of odd length escapes the next character
        breaks = np.flatnonzero(np.diff(slashes) != 1)
        first = slashes[np.concatenate(([0], breaks + 1))]
        after = slashes[np.concatenate((breaks, [len(slashes) - 1]))] + 1
        escaped = after[(after - first) % 2 == 1]
        self._escaped = bool(len(escaped) and escaped[-1] == length)
        return quotes[~np.isin(quotes, escaped, assume_unique=True)]

    def _record_slice(
        self,
        begin: int,
        raw: np.ndarray,
        positions: np.ndarray,
        classes: np.ndarray,
        num_quotes: int,
    ) -> None:
        steps = (classes == OPEN_BRACKET_CLASS).astype(np.int32) - (classes == CLOSE_BRACKET_CLASS)
        depths = self._depth + np.cumsum(steps, dtype=np.int32)
        opened, commas = (
            int(np.count_nonzero(classes == OPEN_BRACKET_CLASS)),
            int(np.count_nonzero(classes == COMMA_CLASS)),
        )
        objects = int(np.count_nonzero(raw[positions[classes == OPEN_BRACKET_CLASS]] == ord("{")))
        colons = int(np.count_nonzero(classes == COLON_CLASS))
        self._values += opened + commas
        self._memory += (
            BYTES_PER_OBJECT * objects
            + BYTES_PER_LIST * (opened - objects)
            + BYTES_PER_VALUE * commas
        )
        self._memory += BYTES_PER_STRING * max((num_quotes + 1) // 2 - colons, 0)
        self._num_key_names += SHARED_KEYS_PER_OBJECT * objects - colons
        if len(positions):
            self._check_limits(begin, positions, classes, depths)
            self._depth = int(depths[-1])
        self._slices.append(
            ((positions + begin).astype(np.uint32), classes, depths.astype(np.int16))
        )

    def _check_limits(
        self, begin: int, positions: np.ndarray, classes: np.ndarray, depths: np.ndarray
    ) -> None:
        limits, last = self._limits, len(positions)
        if int(depths.min()) < 0:
            raise InvalidJson("a bracket closes nothing")
        message = None
        if int(depths.max()) > limits.max_depth:
            last = int(np.argmax(depths > limits.max_depth))
            message = f"is nested more than {limits.max_depth} deep"
        elif self._values > limits.max_values:
            message = f"has more than {limits.max_values} values"
        elif self._memory + DISTINCT_KEY_BYTES * max(-self._num_key_names, 0) > self._max_memory:
            message = "has too many small lists, objects and strings for its size"
        keys = [self._key]
        colons = np.flatnonzero((classes[:last] == COLON_CLASS) & (depths[:last] == 1))
        # on an error, all keys of this slice: the one with the largest value is reported
        for colon in map(int, colons if message else colons[-1:]):
            before = begin + int(positions[colon - 1]) if colon else self._last_position
            keys.append(slice(before + 1, begin + int(positions[colon])))
        if message is not None:
            sizes = np.diff(np.concatenate(([0], colons, [last])))
            raise JsonLimitExceeded(message, keys[int(np.argmax(sizes))])
        self._key, self._last_position = keys[-1], begin + int(positions[-1])

    def finish_scan(self) -> JsonStructure:
        """Check the end and return the whole structure."""
        if self._depth or self._in_string:
            raise InvalidJson("the text ends too early")
        if not self._slices:
            return JsonStructure(
                np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.int16)
            )
        positions, classes, depths = (np.concatenate(parts) for parts in zip(*self._slices))
        return JsonStructure(positions, classes, depths)
