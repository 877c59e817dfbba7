"""Incremental UTF-8 decoding: bytes in any pieces become text that never changes later.

Invalid UTF-8 is replaced in two ways, because the two families of tokenizers differ: byte-level BPE
has one U+FFFD for each broken sequence (as ``bytes.decode(errors="replace")`` does), SentencePiece
one for each broken byte.
"""

from __future__ import annotations

import codecs

REPLACEMENT = "\ufffd"


class Utf8Stream:
    """Decodes UTF-8 piece by piece; at most three bytes are buffered."""

    def __init__(self, *, each_byte: bool = False) -> None:
        self._each_byte = each_byte
        self._tail = b""

    def push(self, data: bytes) -> str:
        """Return the text that `data` completes; an unfinished character stays buffered."""
        return self._decode(data, final=False)

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for an unfinished character, else ""."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._tail + data
        done: list[str] = []
        start = 0
        while True:
            try:
                text, used = codecs.utf_8_decode(data[start:], "strict", final)
            except UnicodeDecodeError as error:
                done.append(data[start : start + error.start].decode("utf-8"))
                done.append(REPLACEMENT * (error.end - error.start if self._each_byte else 1))
                start += error.end
                continue
            done.append(text)
            self._tail = data[start + used :]
            return "".join(done)
