"""Memory that has been freed, kept for the next tensor: glibc's thresholds, in processes of our
own.
"""

from __future__ import annotations

import ctypes

from modelmill.core import env

MMAP_THRESHOLD = 64 << 20
"""Bytes from which malloc maps a block of its own, whose pages are all new and go back when it is
freed.
"""
TRIM_THRESHOLD = 256 << 20
"""Bytes free at the end of the heap from which they go back to the system."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def set_malloc_thresholds() -> bool:
    """Have malloc give tensors the memory of those before; whether it does now.

    By default glibc maps each block of more than 32 MB anew and returns what lies free at the
    heap's end: a fault for every 4 KiB that is written. Nothing is done with another C library, or
    where the user has set malloc's variables."""
    libc = _glibc()
    if libc is None or env.user_set_malloc():
        return False
    return bool(
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        and libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    )


def trim_heap() -> None:
    """Return what is free to the system; for a process that lives on after work that took much."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
