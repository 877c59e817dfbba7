"""Files of saved sessions: a header in JSON, pages, recurrent state, and a SHA-256 of all of it.

A file is written beside its place and renamed when it is complete, so no half-written one is ever
found under its name. Nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelmill.core.errors import UsageError
from modelmill.core.types import ImageEmbeddingSpan
from modelmill.runtime.session_pages import SessionPages, pages_to_save

SESSION_FILE_MAGIC = b"modelmill session 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
MAX_HEADER_BYTES = 1 << 28
MAX_TOKEN_ID = (1 << 31) - 1
_HEADER_LENGTH_STRUCT = struct.Struct("<Q")


def write_session(path: Path, layout: Mapping[str, Any], session: SessionPages) -> int:
    """Write a session; return the bytes of the file.

    Args:
        path: of the file, in a folder that exists; another session there is replaced.
        layout: as of ``session_pages.session_compatibility_layout``.
        session: the pages.

    Raises:
        OSError: it cannot be written.
    """
    pages = len(_session_page_indices(session.tokens, layout))
    spans = [(each.position, each.length, each.digest) for each in session.spans]
    images = {"images": spans} if spans else {}
    header = json.dumps({**layout, "tokens": session.tokens, "pages": pages, **images})
    buffers: list[bytes | memoryview] = [
        SESSION_FILE_MAGIC,
        _HEADER_LENGTH_STRUCT.pack(len(header)),
        header.encode(),
    ]
    parts = session.data if session.state is None else (*session.data, session.state)
    buffers += [np.ascontiguousarray(each).data for each in parts]
    digest = hashlib.sha256()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for buffer in buffers:
                digest.update(buffer)
                file.write(buffer)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return nbytes


def read_session(path: Path, layout: Mapping[str, Any]) -> SessionPages:
    """Read a session.

    Args:
        path: of the file.
        layout: of the engine core that will use it.

    Raises:
        UsageError: it is of another engine or of other KV pages, or damaged.
        OSError: it cannot be read.
    """
    data = np.fromfile(path, np.uint8)
    content = data[: max(len(data) - DIGEST_BYTES, 0)]
    if not data[: len(SESSION_FILE_MAGIC)].tobytes() == SESSION_FILE_MAGIC:
        raise UsageError("the file is not a saved session")
    if hashlib.sha256(content.data).digest() != data[len(content) :].tobytes():
        raise UsageError("the saved session is damaged (its sha256 differs); save it again")
    start = len(SESSION_FILE_MAGIC) + _HEADER_LENGTH_STRUCT.size
    if len(content) < start:
        raise _inconsistent_error()
    (length,) = _HEADER_LENGTH_STRUCT.unpack(content[len(SESSION_FILE_MAGIC) : start].tobytes())
    header = _parse_header(content[start : start + min(length, MAX_HEADER_BYTES)].tobytes())
    _check_rank_count(_num_ranks(header), _num_ranks(layout))
    for key, what in (
        ("engine", "engine"),
        ("page_size", "page size"),
        ("windows", "version or --max-model-len, so that its layers share other pages"),
        ("tensors", "KV dtype"),
        ("rank_page_bytes", "division of the KV heads among ranks"),
        ("states", "dtype of the recurrent state"),
        ("state_bytes", "layout of the recurrent state"),
    ):
        if header.get(key) != layout.get(key):
            raise UsageError(f"the session was saved with another {what}; it cannot be restored")
    return _split_into_pages(header, content[start + length :], layout)


def _num_ranks(layout: Mapping[str, Any]) -> int:
    """Ranks of a layout, or of a header, which may be forged."""
    sizes = layout.get("rank_page_bytes", [0])
    if not isinstance(sizes, list) or not sizes:
        raise _inconsistent_error()
    return len(sizes)


def _check_rank_count(saved: int, current: int) -> None:
    """Raise UsageError if a session of so many ranks is not for this engine core."""
    if saved != current:
        raise UsageError(
            f"the session was saved with --tp {saved} and the engine runs with --tp {current}; "
            f"serve it with --tp {saved} to restore it"
        )


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise _inconsistent_error() from None
    if not isinstance(header, dict):
        raise _inconsistent_error()
    return header


def _split_into_pages(
    header: Mapping[str, Any], body: np.ndarray, layout: Mapping[str, Any]
) -> SessionPages:
    """Cut the body into the pages of each tensor, or of each rank."""
    tokens, count = header.get("tokens"), header.get("pages")
    if not isinstance(tokens, list) or type(count) is not int or count < 1:
        raise _inconsistent_error()
    if not all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in tokens):
        raise _inconsistent_error()
    sizes = layout.get("rank_page_bytes")
    if sizes is None:
        sizes = [_page_bytes(shape, dtype) for shape, dtype in layout["tensors"]]
    state_bytes = layout.get("state_bytes", 0)
    whole = len(tokens) % layout["page_size"] == 0
    places = _session_page_indices(tokens, layout)
    if not whole or count != len(places) or len(body) != count * sum(sizes) + state_bytes:
        raise _inconsistent_error()
    data, start = [], 0
    for size in sizes:
        data.append(body[start : start + count * size].reshape(count, size))
        start += count * size
    state = body[start:] if "state_bytes" in layout else None
    return SessionPages(tuple(tokens), tuple(data), state, _parse_spans(header, len(tokens)))


def _parse_spans(header: Mapping[str, Any], num_tokens: int) -> tuple[ImageEmbeddingSpan, ...]:
    """The ranges of images; the last one may reach beyond the tokens."""
    spans = header.get("images", [])
    if not isinstance(spans, list):
        raise _inconsistent_error()
    for each in spans:
        if not isinstance(each, list) or [type(field) for field in each] != [int, int, str]:
            raise _inconsistent_error()
        if not (0 <= each[0] < num_tokens and each[1] > 0 and each[2].isascii()):
            raise _inconsistent_error()
    return tuple(ImageEmbeddingSpan(*each) for each in spans)


def _session_page_indices(
    tokens: Sequence[int], layout: Mapping[str, Any]
) -> list[tuple[int, int]]:
    page_size, windows = layout["page_size"], tuple(layout.get("windows", (None,)))
    return pages_to_save(len(tokens) // page_size, page_size, windows)


def _page_bytes(shape: list[int], dtype: str) -> int:
    widths = {"float32": 4, "float16": 2, "bfloat16": 2}
    return int(np.prod(shape)) * widths.get(dtype, 1)


def _inconsistent_error() -> UsageError:
    return UsageError("the saved session contradicts itself; save it again")
