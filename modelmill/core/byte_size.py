"""Formats byte counts for people."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Format a byte count in the largest unit that gives at least 1."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.2f} {unit}"
    return f"{count} bytes"
