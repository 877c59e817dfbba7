"""Replies as JSON of any size, written so that other threads go on meanwhile.

``json.dumps`` keeps the interpreter to itself until it is done: what holds many values is given to
it in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_CHUNK_VALUES = 4096
"""Values that are written at once: a millisecond or two."""
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class EncodedJson(bytes):
    """A value that is JSON already: where many wait to be sent, the collector of garbage has one
    object to look at.
    """


def dump_json(value: Any) -> bytes:
    """JSON in UTF-8.

    Halves of a surrogate pair, which a request may bring and UTF-8 cannot write, become ``?``.
    """
    return b"".join(_iter_chunks(value))


def dump_small_json(value: Any) -> bytes:
    """The same of a value that is known to be small."""
    return _JSON.encode(value).encode("utf-8", "replace")


def _iter_chunks(value: Any) -> Iterator[bytes]:
    if isinstance(value, EncodedJson):
        yield value
    elif _count_values(value, MAX_CHUNK_VALUES) < MAX_CHUNK_VALUES:
        yield dump_small_json(value)
    else:
        yield from _iter_object(value) if isinstance(value, dict) else _iter_list(value)


def _iter_object(value: dict[str, Any]) -> Iterator[bytes]:
    before = b"{"
    for key, each in value.items():
        yield before + dump_small_json(key) + b":"
        yield from _iter_chunks(each)
        before = b","
    yield b"}"


def _iter_list(value: list[Any] | tuple[Any, ...]) -> Iterator[bytes]:
    before, begin, gathered = b"[", 0, 0
    for place, each in enumerate(value):
        size = _count_values(each, MAX_CHUNK_VALUES)
        if gathered + size < MAX_CHUNK_VALUES:
            gathered += size
            continue
        if place > begin:
            yield before + dump_small_json(value[begin:place])[1:-1]
            before = b","
        begin, gathered = place, size
        if size >= MAX_CHUNK_VALUES:
            yield before
            yield from _iter_chunks(each)
            before, begin, gathered = b",", place + 1, 0
    if begin < len(value):
        yield before + dump_small_json(value[begin:])[1:-1]
    yield b"]"


def _count_values(value: Any, max_values: int) -> int:
    """How many values it is; of one that has ``max_values`` or more, some number of at least that.

    ``EncodedJson`` counts as large: it is to be written by itself.
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
                count += _count_values(each, max_values - count)
                if count >= max_values:
                    break
    return count
