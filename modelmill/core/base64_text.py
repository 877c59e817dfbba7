"""Bytes out of base64, in pieces: a picture of many MB would keep the interpreter to itself for a tenth of a second."""

from __future__ import annotations

import binascii

PIECE = 256 << 10
_BLANK = b" \t\n\r\f\v"


def decoded(text: str, begin: int = 0) -> bytes:
    """What ``text`` from ``begin`` on stands for; white space is left out. Raises ValueError where it is no base64."""
    out = bytearray()
    left = b""
    for at in range(begin, len(text), PIECE):
        raw = left + text[at : at + PIECE].encode("ascii").translate(None, _BLANK)
        last = at + PIECE >= len(text)
        end = len(raw) if last else len(raw) // 4 * 4
        piece, left = raw[:end], raw[end:]
        if not piece:
            continue
        if out and len(out) % 3:
            raise ValueError("padding in the middle")
        out += binascii.a2b_base64(piece, strict_mode=True)
    return bytes(out)
