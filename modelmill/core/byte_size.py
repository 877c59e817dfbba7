"""Byte counts as people read them."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.2f} {unit}"
    return f"{count} bytes"
