"""Decodes base64 in chunks.

One call for an image of many MB would hold the GIL for a tenth of a second.
"""

from __future__ import annotations

import binascii

CHUNK_CHARS = 256 << 10
_WHITESPACE = b" \t\n\r\f\v"


def decode_base64(text: str, start: int = 0) -> bytes:
    """Decode ``text[start:]``, ignoring white space.

    Raises:
        ValueError: if it is not valid base64.
    """
    out = bytearray()
    left = b""
    for at in range(start, len(text), CHUNK_CHARS):
        raw = left + text[at : at + CHUNK_CHARS].encode("ascii").translate(None, _WHITESPACE)
        last = at + CHUNK_CHARS >= len(text)
        end = len(raw) if last else len(raw) // 4 * 4
        piece, left = raw[:end], raw[end:]
        if not piece:
            continue
        if out and len(out) % 3:
            raise ValueError("padding in the middle")
        out += binascii.a2b_base64(piece, strict_mode=True)
    return bytes(out)
