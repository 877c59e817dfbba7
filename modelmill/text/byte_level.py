"""The alphabet of byte-level BPE: each of the 256 bytes stands as one printable character."""

from __future__ import annotations


def byte_level_char_to_byte() -> dict[str, int]:
    """Character → byte.

    Printable Latin-1 stands for itself, the others move up to U+0100 and beyond.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + i): byte for i, byte in enumerate(moved)
    }
