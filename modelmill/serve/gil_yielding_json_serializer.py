"""Serializes JSON of any size without blocking other threads for long.

``json.dumps`` holds the GIL until it is done, so values with many elements are serialized in
pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_CHUNK_VALUES = 4096
"""Values serialized at once: a millisecond or two."""
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class EncodedJson(bytes):
    """A value that is already serialized.

    Many that wait to be sent are single objects for the garbage collector.
    """


def dump_json(value: Any) -> bytes:
    """Serialize as JSON in UTF-8.

    Unpaired surrogates, which a request may contain and UTF-8 cannot encode, become ``?``.
    """
    return b"".join(_iter_chunks(value))


def dump_small_json(value: Any) -> bytes:
    """As ``dump_json``, for a value that is known to be small."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def _iter_chunks(value: Any) -> Iterator[bytes]:
    if isinstance(value, EncodedJson):
        yield value
    elif _count_values_up_to(value, MAX_CHUNK_VALUES) < MAX_CHUNK_VALUES:
        yield dump_small_json(value)
    else:
        yield from _iter_object(value) if isinstance(value, dict) else _iter_list(value)


def _iter_object(value: dict[str, Any]) -> Iterator[bytes]:
    prefix = b"{"
    for key, each in value.items():
        yield prefix + dump_small_json(key) + b":"
        yield from _iter_chunks(each)
        prefix = b","
    yield b"}"


def _iter_list(value: list[Any] | tuple[Any, ...]) -> Iterator[bytes]:
    prefix = b"["
    begin = 0
    num_values = 0
    for index, each in enumerate(value):
        size = _count_values_up_to(each, MAX_CHUNK_VALUES)
        if num_values + size < MAX_CHUNK_VALUES:
            num_values += size
            continue
        if index > begin:
            yield prefix + dump_small_json(value[begin:index])[1:-1]
            prefix = b","
        begin, num_values = index, size
        if size >= MAX_CHUNK_VALUES:
            yield prefix
            yield from _iter_chunks(each)
            prefix = b","
            begin = index + 1
            num_values = 0
    if begin < len(value):
        yield prefix + dump_small_json(value[begin:])[1:-1]
    yield b"]"


def _count_values_up_to(value: Any, max_values: int) -> int:
    """Number of values in ``value``; any number of at least ``max_values`` if it has that many.

    ``EncodedJson`` counts as large, because it is written by itself.
    """
    if isinstance(value, dict):
        inner: Any = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    else:
        return max_values if isinstance(value, EncodedJson) else 1
    count = 1 + len(value)
    if count < max_values:
        for each in inner:
            if isinstance(each, (dict, list, tuple, EncodedJson)):
                count += _count_values_up_to(each, max_values - count)
                if count >= max_values:
                    break
    return count
