"""Texts that clients pass on unread, in fields that are called ``encrypted_content``.

They are not encrypted, as the field's name says at its origin: they are text of the client's own
conversation (summaries, thinking), compressed.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from modelmill.core.errors import RequestError

PACKED_TEXT_PREFIX = "mm1:"
MAX_UNPACKED_BYTES = 4 << 20
"""Of the texts of one request together: a kilobyte of a body can become a megabyte."""


def compress_text(text: str) -> str:
    """The text as ``encrypted_content``."""
    return (
        PACKED_TEXT_PREFIX
        + base64.b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode()
    )


class TextDecompressor:
    """Unpacks the texts of one request."""

    def __init__(self) -> None:
        self._remaining = MAX_UNPACKED_BYTES

    def decompress(self, content: str) -> str:
        """The text in ``encrypted_content``.

        Raises:
            RequestError: it is none of this server's, or the texts are too large together.
        """
        try:
            if not content.startswith(PACKED_TEXT_PREFIX):
                raise ValueError
            data = base64.b64decode(content.removeprefix(PACKED_TEXT_PREFIX), validate=True)
            packed = zlib.decompressobj()
            # one byte more: 0 would mean no limit
            raw = packed.decompress(data, self._remaining + 1)
            is_too_large = len(raw) > self._remaining  # and may end inside of a character
            if not (is_too_large or packed.eof):
                raise ValueError  # its end is missing
            text = "" if is_too_large else raw.decode()
        except (ValueError, binascii.Error, zlib.error):
            raise RequestError(
                "encrypted_content is not of this server; leave the item out"
            ) from None
        if is_too_large:
            raise RequestError(
                "encrypted_content: the items have more than "
                f"{MAX_UNPACKED_BYTES >> 20} MiB of text"
            )
        self._remaining -= len(raw)
        return text
