"""Byte counts as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNIT_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNIT_BYTES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTE_SIZE_PATTERN = re.compile(
    r"([+-]?\d+(?:\.\d+)?(?:[eE]\d{1,2})?)\s*([kmgt]i?)?(b|bytes?)?", re.IGNORECASE
)


def parse_bytes(text: str) -> int | None:
    """Parse a byte count: a number, or one with a unit such as 8GiB, 8GB, 8G or 1.5 MiB.

    K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024.

    Args:
        text: what a user wrote; letter case does not matter.

    Returns:
        The bytes, rounded down; None if the text is no size.
    """
    match = _BYTE_SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        return None
    number, unit, _ = match.groups()
    value = Decimal(number)
    if not unit and value != value.to_integral_value():
        return None
    return int(value * _UNIT_BYTES[(unit or "").lower()])


def format_bytes(count: int) -> str:
    """Format a byte count in the largest unit that gives at least 1."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.2f} {unit}"
    return f"{count} bytes"
